"""A child dies with a message in its hands: who is charged, and for what (docs/failure-model.md)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.pgmq.records import DeadLetter, Release, Retry
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.types import SUCCESS, DeathCause
from tests.unit.core.stage import Q, Stage, accounts, facts, queue, row


def charged(**numbers: int) -> str:
    """The entry that a settlement writes."""
    return json.dumps({"queue": "q", "msg_id": 1, "refunds": 0, **numbers}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("how", "cause", "reason"),
    [
        ({"signal": "SIGSEGV"}, "signal", "died"),
        ({"signal": "SIGKILL"}, "signal", "died"),
        ({"exit_code": 0}, "exit", "died"),
        ({"exit_code": 1}, "exit", "died"),
        ({"signal": "SIGKILL", "oom": True}, "oom", "memory_limit"),
    ],
)
def test_a_death_is_charged_and_named(how: dict[str, Any], cause: str, reason: str) -> None:
    """Retried by policy; at max_deaths dead-lettered with the kind of the last death. Exit 0 is no success."""
    stage = Stage(queue(max_deaths=2)).start()
    dispatch = stage.run(row(1))
    stage.die(dispatch.child, **how)
    (item,) = stage.settlements()
    assert item.settlement == Retry(1_000, charged(deaths=1))
    (ended,) = stage.told(h.ChildEnded)
    assert (ended.cause, ended.msg_id, ended.charged) == (cause, 1, True)

    stage = Stage(queue(max_deaths=2)).start()
    dispatch = stage.run(row(1, read_ct=2, accounts=accounts(1, deaths=1)))
    stage.die(dispatch.child, **how)
    (item,) = stage.settlements()
    assert isinstance(item.settlement, DeadLetter)
    document = json.loads(item.settlement.envelope)
    assert (document["reason"], document["source"]["deaths"], document["error"]) == (reason, 2, None)
    assert document["death"] == {
        "cause": cause,
        "signal": how.get("signal"),
        "exit_code": how.get("exit_code"),
        "max_rss_kb": 12_345,
        "cpu_s": 0.5,
        "stack": "the stack",
        "output_tail": "the output",
    }


def test_a_death_at_the_last_attempt_is_dead_lettered() -> None:
    """max_attempts counts deaths too."""
    stage = Stage(queue(max_attempts=2, max_deaths=9)).start()
    dispatch = stage.run(row(1, read_ct=2))
    stage.die(dispatch.child)
    (item,) = stage.settlements()
    assert isinstance(item.settlement, DeadLetter)
    assert json.loads(item.settlement.envelope)["reason"] == "died"


def test_no_other_message_is_touched() -> None:
    """One message in flight a child: a death has exactly one suspect, and the others go on."""
    stage = Stage(queue(concurrency=3)).start()
    _first, second, _third = stage.run_all(row(1), row(2), row(3))
    stage.die(second.child)
    assert [item.fence.msg_id for item in stage.settlements()] == [2]
    assert [child.msg_id for child in stage.look().children] == [1, 3, None]


def test_the_slot_is_filled_at_once() -> None:
    """A death with a message in hand never delays a start: fifty poison messages must not park a queue."""
    stage = Stage(queue(max_deaths=99, max_attempts=99)).start()
    for msg_id in range(1, 51):
        dispatch = stage.run(row(msg_id))
        stage.die(dispatch.child)
        assert stage.only(c.StartChild).slot == 0
        stage.ready()
    assert stage.look().parked is None
    assert not stage.told(h.ChildFailedToStart)


def test_a_whole_result_before_the_death_counts() -> None:
    """Writes "done" and is killed in the same millisecond: exactly one verdict."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(
        e.MessageFinished(dispatch.child, dispatch.claim_id, SUCCESS),
        e.ChildDied(dispatch.child, facts(signal="SIGKILL")),
    )
    (item,) = stage.settlements()
    assert item.settlement.__class__.__name__ == "Ack"
    (ended,) = stage.told(h.ChildEnded)
    assert (ended.msg_id, ended.charged) == (None, False)


def test_a_result_counts_also_while_the_kill_is_on_its_way() -> None:
    """The hard limit came a moment too late."""
    stage = Stage(queue(hard_timeout_s=10.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(10.0)
    assert stage.all(c.KillChild)
    stage.finish(dispatch)
    assert len(stage.settlements()) == 1
    stage.die(dispatch.child, signal="SIGKILL")
    assert not stage.settlements()


# --- before the handler started ---------------------------------------------------------------------------------------


def test_a_death_before_the_start_sends_the_message_to_another_child() -> None:
    """Not its fault: uncharged, at once, within the same delivery."""
    stage = Stage(queue(concurrency=2)).start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.die(dispatch.child)
    again = stage.only(c.Dispatch)
    assert (again.msg_id, again.attempt, again.body) == (1, 1, b"{}")
    assert again.child != dispatch.child
    (ended,) = stage.told(h.ChildEnded)
    assert not ended.charged


def test_the_oldest_of_those_that_wait_again_is_given_back_in_time() -> None:
    """Whoever comes back last is not the first whose time is up."""
    stage = Stage(queue(concurrency=2)).start()
    first = stage.give(row(1)).only(c.Dispatch)
    stage.wait(1.0)
    second = stage.give(row(2)).only(c.Dispatch)
    for dispatch in (first, second):
        stage.tell(e.ChildDied(dispatch.child, facts(signal="SIGKILL")))
    assert [delivery.msg_id for delivery in stage.core._queues[Q].waiting] == [1, 2]  # type: ignore[attr-defined]
    stage.wait(4.0)
    assert [item.fence.msg_id for item in stage.settlements()] == [1, 2]


def test_deaths_before_the_start_are_refunded_only_so_often() -> None:
    """A message that kills every child before its handler starts must end as well: at most max_deaths are free."""
    stage = Stage(queue(max_deaths=2)).start()
    stage.give(row(1))
    for _ in range(2):
        stage.die(stage.only(c.Dispatch).child)
        stage.ready()
    stage.die(stage.only(c.Dispatch).child)
    (item,) = stage.settlements()
    assert item.settlement == Retry(1_000, charged(deaths=1, early=2))


def test_what_was_free_before_is_remembered() -> None:
    """The count is kept in the headers, across deliveries."""
    stage = Stage(queue(max_deaths=2)).start()
    dispatch = stage.give(row(1, read_ct=3, accounts=accounts(1, early=2))).only(c.Dispatch)
    stage.die(dispatch.child)
    (item,) = stage.settlements()
    assert item.settlement == Retry(4_000, charged(deaths=1, early=2))


def test_a_child_that_never_begins_is_killed_and_its_message_never_charged() -> None:
    """SIGSTOP right after the dispatch: found by the dispatch deadline."""
    stage = Stage(queue(max_deaths=1, concurrency=2)).start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.wait(4.99)
    assert not stage.all(c.KillChild)
    stage.wait(0.01)
    assert stage.only(c.KillChild).child == dispatch.child
    stage.die(dispatch.child, signal="SIGKILL")
    (ended,) = stage.told(h.ChildEnded)
    assert (ended.cause, ended.charged) == (DeathCause.UNRESPONSIVE, False)
    (item,) = stage.settlements()  # it waited for too long already: another host may have it
    assert item.settlement == Release('{"queue":"q","msg_id":1,"refunds":1,"deaths":0}', 0)


def test_a_child_that_dies_while_it_is_only_reserved_charges_nobody() -> None:
    """A large body was on its way; the child never had the message, so this is the death of an idle child."""
    stage = Stage(queue(concurrency=2, max_deaths=1)).start()
    stage.give(row(1, body=None, body_loaded=False, body_bytes=10**6))
    fetch = stage.only(c.FetchBody)
    reserved = next(child for child in stage.look().children if child.state == "reserved")
    stage.die(reserved.child)  # type: ignore[arg-type]
    assert stage.only(c.FetchBody).claim_id == fetch.claim_id
    assert len(stage.told(h.ChildFailedToStart)) == 1
    dispatch = stage.tell(e.BodyFetched(fetch.queue, fetch.claim_id, True, b"[]")).only(c.Dispatch)
    stage.tell(e.MessageStarted(dispatch.child, dispatch.claim_id))
    stage.die(dispatch.child)
    (item,) = stage.settlements()
    assert isinstance(item.settlement, DeadLetter)  # the first death that counts


# --- ends that are nobody's fault -------------------------------------------------------------------------------------


def test_an_unkillable_child_is_given_up() -> None:
    """Killed and not dead after 5 s: the slot is filled; its message is left to its lease, as it may still run."""
    stage = Stage(queue(hard_timeout_s=1.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(1.0)
    assert stage.states() == ["killed"]
    stage.wait(5.0)
    assert stage.only(c.AbandonChild).child == dispatch.child
    assert len(stage.told(h.ChildUnkillable)) == 1
    assert not stage.settlements()
    assert stage.only(c.StartChild).slot == 0
    assert stage.look().in_flight == 0
    stage.die(dispatch.child, signal="SIGKILL")
    assert not stage.settlements()


def test_rubbish_on_the_socket_costs_one_child() -> None:
    """A protocol error kills that child only, and is a death like any other for its message."""
    stage = Stage(queue(concurrency=2)).start()
    dispatch = stage.run(row(1))
    stage.tell(e.ProtocolBroken(dispatch.child, "bad magic"))
    assert [kill.child for kill in stage.all(c.KillChild)] == [dispatch.child]
    stage.die(dispatch.child, signal="SIGKILL")
    (item,) = stage.settlements()
    assert item.settlement == Retry(1_000, charged(deaths=1))
    assert stage.told(h.ChildEnded)[0].cause is DeathCause.PROTOCOL

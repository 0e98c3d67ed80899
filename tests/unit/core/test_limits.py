"""Limits of a running message: soft, hard, memory, cancel; each with its ladder."""

from __future__ import annotations

import json

import pytest

from shared.pgmq.records import Ack, AckMode, DeadLetter, Release, Retry
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.types import DeathCause, Outcome, OutcomeKind, StopReason
from tests.unit.core.stage import FAILURE, STOPPED, Q, Stage, queue, row

MB = 1 << 20


def reason_of(settlement: object) -> str:
    """Why it was dead-lettered."""
    assert isinstance(settlement, DeadLetter)
    reason: str = json.loads(settlement.envelope)["reason"]
    return reason


# --- time -------------------------------------------------------------------------------------------------------------


def test_soft_timeout_only_asks() -> None:
    """A stop request; no signal, no kill."""
    stage = Stage(queue(soft_timeout_s=10.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(9.9)
    assert not stage.all(c.SendStop)
    stage.wait(0.1)
    assert stage.only(c.SendStop) == c.SendStop(dispatch.child, dispatch.claim_id, StopReason.SOFT_TIMEOUT)
    stage.wait(4.0)
    assert not stage.all(c.SendStop)
    assert not stage.all(c.SendTerm)
    assert not stage.all(c.KillChild)


def test_stopping_after_soft_timeout_is_a_failed_attempt() -> None:
    """`raise_if_stopped()` then costs an attempt."""
    stage = Stage(queue(soft_timeout_s=10.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(10.0)
    stage.finish(dispatch, STOPPED)
    (item,) = stage.settlements()
    assert item.settlement == Retry(1_000, None)
    stage.settle()
    assert stage.told(h.MessageRetried)[0].reason == "soft_timeout"


def test_finishing_after_soft_timeout_is_a_success() -> None:
    """It was only asked."""
    stage = Stage(queue(soft_timeout_s=10.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(10.0)
    assert stage.finish(dispatch).settlements()[0].settlement == Ack(AckMode.DELETE)


def test_hard_timeout_kills_at_once_with_the_stack() -> None:
    """Also inside C code: no request, no step between; charged as its cause whatever the wait status says."""
    stage = Stage(queue(hard_timeout_s=20.0, max_deaths=1)).start()
    dispatch = stage.run(row(1))
    assert dispatch.hard_timeout_s == 20.0
    stage.wait(15.0)
    stage.renew()
    stage.wait(4.9)
    assert not stage.all(c.KillChild)
    stage.wait(0.1)
    assert stage.only(c.KillChild) == c.KillChild(dispatch.child, with_stack=True)
    assert not stage.all(c.SendStop)
    stage.die(dispatch.child, signal="SIGKILL")
    assert stage.told(h.ChildEnded)[0].cause is DeathCause.HARD_TIMEOUT
    assert reason_of(stage.settlements()[0].settlement) == "hard_timeout"


def test_the_hard_timeout_counts_from_the_start_of_the_handler() -> None:
    """Not from the dispatch."""
    stage = Stage(queue(hard_timeout_s=2.0)).start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.wait(1.5)
    stage.tell(e.MessageStarted(dispatch.child, dispatch.claim_id))
    stage.wait(1.9)
    assert not stage.all(c.KillChild)
    stage.wait(0.1)
    assert stage.all(c.KillChild)


def test_no_limit_is_really_none() -> None:
    """With "none" the lease is renewed for hours, and nothing else happens."""
    stage = Stage(queue(hard_timeout_s=None)).start()
    dispatch = stage.run(row(1))
    assert dispatch.hard_timeout_s is None
    for _ in range(500):
        while not stage.all(c.Renew):
            stage.wait(1.0)
        stage.renew()
        assert not stage.all(c.KillChild)
    assert stage.now > 6_000
    assert stage.finish(dispatch).settlements()[0].settlement == Ack(AckMode.DELETE)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_limit_kills_a_running_message() -> None:
    """Only the child dies, cause memory; charged."""
    stage = Stage(queue(memory_limit_bytes=100 * MB, max_deaths=1)).start()
    dispatch = stage.run(row(1))
    stage.tell(e.MemoryMeasured(dispatch.child, 100 * MB))
    assert not stage.all(c.KillChild)
    stage.tell(e.MemoryMeasured(dispatch.child, 100 * MB + 1))
    assert stage.only(c.KillChild).with_stack
    stage.die(dispatch.child, signal="SIGKILL")
    assert reason_of(stage.settlements()[0].settlement) == "memory_limit"


def test_a_child_over_its_memory_limit_between_messages_is_replaced() -> None:
    """The next message should not die for what an earlier one left; the successor starts first."""
    stage = Stage(queue(memory_limit_bytes=100 * MB)).start()
    dispatch = stage.run(row(1))
    stage.core._queues[Q].pool.children[dispatch.child].tree_bytes = 101 * MB
    stage.finish(dispatch)
    assert not stage.all(c.SendExit)
    assert stage.only(c.StartChild).slot == 0
    stage.ready()
    assert stage.only(c.SendExit).child == dispatch.child


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_asks_then_terminates_then_kills() -> None:
    """Stop request, TERM after 1 s, KILL after 5 s; dead letter `cancelled`, no death charged."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(e.CancelRequested(Q, 1))
    assert stage.only(c.SendStop).reason is StopReason.CANCELLED
    stage.wait(0.9)
    assert not stage.all(c.SendTerm)
    stage.wait(0.1)
    assert stage.only(c.SendTerm).child == dispatch.child
    stage.wait(3.9)
    assert not stage.all(c.KillChild)
    stage.wait(0.1)
    assert stage.only(c.KillChild).child == dispatch.child
    stage.die(dispatch.child, signal="SIGKILL")
    (ended,) = stage.told(h.ChildEnded)
    assert (ended.cause, ended.charged) == (DeathCause.CANCELLED, False)
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"


@pytest.mark.parametrize("outcome", [STOPPED, FAILURE, Outcome(OutcomeKind.RETRY), Outcome(OutcomeKind.ABANDON)])
def test_a_cancelled_message_does_not_run_again(outcome: Outcome) -> None:
    """Whatever its handler says on its way out."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(e.CancelRequested(Q, 1))
    stage.finish(dispatch, outcome)
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"


def test_a_cancel_that_comes_at_completion_does_not_undo_it() -> None:
    """The handler was through: a success is a success, and what is being settled stays."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(e.CancelRequested(Q, 1))
    assert stage.finish(dispatch).settlements()[0].settlement == Ack(AckMode.DELETE)
    assert not stage.core.holds("q", 1)
    assert not stage.tell(e.CancelRequested(Q, 1)).last


def test_a_cancelled_message_that_dies_is_cancelled_and_charged() -> None:
    """It died by itself while it was asked to go."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(e.CancelRequested(Q, 1))
    stage.die(dispatch.child)
    assert stage.told(h.ChildEnded)[0].charged
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"


def test_a_message_that_no_child_has_yet_is_cancelled_at_once() -> None:
    """Waiting, loading, or sent to a child that dies before it starts."""
    stage = Stage().start()
    stage.core._queues[Q].pacing.estimate_s = 0.001  # type: ignore[attr-defined]
    stage.give(row(1), row(2))
    stage.tell(e.CancelRequested(Q, 2))
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"

    stage = Stage().start()
    fetch = stage.give(row(1, body=None, body_loaded=False, body_bytes=9)).only(c.FetchBody)
    stage.tell(e.CancelRequested(Q, 1))
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"
    assert not stage.tell(e.BodyFetched(Q, fetch.claim_id, True, b"{}")).all(c.Dispatch)

    stage = Stage().start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.tell(e.CancelRequested(Q, 1))
    stage.die(dispatch.child)
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"


def test_cancelling_what_is_not_ours_does_nothing() -> None:
    """Another supervisor may have it."""
    stage = Stage().start()
    assert not stage.core.holds("q", 9)
    assert not stage.core.holds("elsewhere", 9)
    assert not stage.tell(e.CancelRequested(Q, 9)).last


def test_a_stronger_reason_to_stop_replaces_a_weaker_one() -> None:
    """Never the other way round."""
    stage = Stage(queue(soft_timeout_s=1.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(1.0)
    stage.tell(e.CancelRequested(Q, 1))
    assert stage.only(c.SendStop).reason is StopReason.CANCELLED
    stage.tell(e.ShutdownRequested())
    assert not stage.all(c.SendStop)
    stage.finish(dispatch, STOPPED)
    assert reason_of(stage.settlements()[0].settlement) == "cancelled"


def test_progress_is_shown_for_the_message_that_reported_it() -> None:
    """A late word about an earlier message says nothing about this one."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(e.ProgressReported(dispatch.child, dispatch.claim_id, "half"))
    assert stage.look().children[0].progress == "half"
    stage.tell(e.ProgressReported(dispatch.child, dispatch.claim_id + 1, "other"))  # type: ignore[arg-type]
    assert stage.look().children[0].progress == "half"
    assert not stage.told(h.HandlerProgress)


def test_stopping_at_shutdown_is_refunded() -> None:
    """`raise_if_stopped()` during a drain: the delivery does not count."""
    stage = Stage().start()
    dispatch = stage.run(row(1, read_ct=2))
    stage.tell(e.ShutdownRequested())
    assert stage.only(c.SendStop).reason is StopReason.SHUTDOWN
    stage.finish(dispatch, STOPPED)
    assert stage.settlements()[0].settlement == Release('{"queue":"q","msg_id":1,"refunds":1,"deaths":0}', 0)

"""How much to claim and when; what is held ahead, and when it is given back."""

from __future__ import annotations

import pytest

from shared.pgmq.records import DeadLetter, Release
from shared.wire.frames import MAX_BODY_BYTES
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.settings import Timing
from supervisor.core.types import SUCCESS, QueueName
from tests.unit.core.stage import Q, Stage, accounts, queue, row

RELEASED = '{{"queue":"q","msg_id":{},"refunds":1,"deaths":0}}'


def fast(stage: Stage, *, estimate_s: float = 0.005) -> Stage:
    """Messages have taken so long lately, by measurement."""
    stage.core._queues[Q].pacing.estimate_s = estimate_s  # type: ignore[attr-defined]
    return stage


# --- how much ---------------------------------------------------------------------------------------------------------


def test_nothing_is_claimed_before_a_child_is_ready() -> None:
    """A lease would run while nobody can work."""
    stage = Stage(queue(concurrency=3))
    stage.tell(e.Started())
    assert not stage.all(c.Claim)
    stage.ready()
    assert stage.only(c.Claim) == c.Claim(Q, 1, 30.0, 16 << 20)  # as soon as the first one is


def test_nothing_is_held_ahead_while_nothing_is_measured() -> None:
    """Never more than free children."""
    stage = Stage(queue(concurrency=4))
    stage.tell(e.Started()).ready()
    stage.give()
    stage.tell(e.Notified(Q))
    assert stage.only(c.Claim).limit == 4


def test_about_fifty_milliseconds_of_work_are_held_ahead() -> None:
    """By measured handler time, for each child that works."""
    stage = fast(Stage(queue(concurrency=2)).start())
    stage.give().tell(e.Notified(Q))
    assert stage.only(c.Claim).limit == 2 + 20


def test_slow_work_is_not_held_ahead() -> None:
    """A message that takes longer than that keeps another host waiting."""
    stage = fast(Stage(queue(concurrency=2)).start(), estimate_s=0.06)
    stage.give().tell(e.Notified(Q))
    assert stage.only(c.Claim).limit == 2


def test_the_batch_size_bounds_a_claim() -> None:
    """claim_batch_size."""
    stage = fast(Stage(queue(concurrency=2, claim_batch_size=5)).start())
    stage.give().tell(e.Notified(Q))
    assert stage.only(c.Claim).limit == 5


def test_max_in_flight_bounds_what_is_held_and_run() -> None:
    """Together, killed children included until they are gone."""
    stage = fast(Stage(queue(concurrency=2, max_in_flight=3, hard_timeout_s=1.0)).start())
    stage.give().tell(e.Notified(Q))
    assert stage.only(c.Claim).limit == 3
    first, _second = stage.run_all(row(1), row(2), row(3))
    assert not stage.all(c.Claim)
    stage.tell(e.MessageFinished(first.child, first.claim_id, SUCCESS))
    assert stage.only(c.Claim).limit == 1


def test_only_one_claim_is_under_way() -> None:
    """Whatever wakes the queue meanwhile."""
    stage = Stage(queue(concurrency=2)).start()
    assert not stage.tell(e.Notified(Q), e.ListenerUp((Q,))).all(c.Claim)


def test_bodies_are_claimed_up_to_a_budget() -> None:
    """100 messages of 50 MB must not meet in one result, nor wait in the parent."""
    stage = Stage(queue(concurrency=1), max_held_bytes=1000)
    assert stage.start().claiming == c.Claim(Q, 1, 30.0, 1000)
    fast(stage)
    stage.give(row(1, body_bytes=100), row(2, body_bytes=300), row(3, body_bytes=300))
    assert stage.look().held_bytes == 700
    assert stage.core._ctx.held_bytes == 600  # what a child has is not waiting


def test_a_queue_whose_budget_another_queue_holds_looks_again() -> None:
    """Nobody tells it when bytes are free again."""
    stage = Stage(queue("q"), queue("r"), max_held_bytes=1000)
    stage.start()
    fast(stage)
    stage.give(row(1), row(2, body_bytes=2000))
    stage.give().tell(e.Notified(Q), e.Notified(QueueName("r")))
    assert not stage.all(c.Claim)
    stage.core._ctx.held_bytes = 0
    assert stage.wait(0.2).all(c.Claim)


# --- large bodies -----------------------------------------------------------------------------------------------------


def test_a_large_body_is_fetched_when_a_child_is_free_for_it() -> None:
    """The child is reserved; the message reaches it whole."""
    stage = Stage().start()
    fetch = stage.give(row(1, body=None, body_loaded=False, body_bytes=10**8)).only(c.FetchBody)
    assert stage.states() == ["reserved"]
    dispatch = stage.tell(e.BodyFetched(Q, fetch.claim_id, True, b"[1]")).only(c.Dispatch)
    assert dispatch.body == b"[1]"
    assert stage.states() == ["busy"]


def test_a_body_whose_row_is_gone_costs_nothing() -> None:
    """Somebody else settled or claimed it: the child is free again."""
    stage = Stage().start()
    fetch = stage.give(row(1, body=None, body_loaded=False)).only(c.FetchBody)
    stage.tell(e.BodyFetched(Q, fetch.claim_id, False, None))
    assert len(stage.told(h.LeaseLost)) == 1
    assert not stage.settlements()
    assert stage.all(c.Claim)


def test_a_body_that_cannot_be_fetched_is_given_back_for_a_while() -> None:
    """Uncharged."""
    stage = Stage().start()
    fetch = stage.give(row(1, body=None, body_loaded=False)).only(c.FetchBody)
    stage.tell(e.BodyFetchFailed(Q, fetch.claim_id, "out of memory"))
    assert stage.settlements()[0].settlement == Release(RELEASED.format(1), 1000)


def test_a_body_that_can_never_be_read_is_dead_lettered() -> None:
    """No handler will ever see it."""
    stage = Stage().start()
    fetch = stage.give(row(1, body=None, body_loaded=False)).only(c.FetchBody)
    stage.tell(e.BodyFetchFailed(Q, fetch.claim_id, "invalid memory alloc request size", permanent=True))
    settlement = stage.settlements()[0].settlement
    assert isinstance(settlement, DeadLetter)
    assert '"reason":"invalid_message"' in settlement.envelope


def test_a_body_that_hangs_is_given_back_before_its_lease_is_over() -> None:
    """Then its late answer says nothing."""
    stage = Stage(queue(visibility_timeout_s=2.0)).start()
    fetch = stage.give(row(1, body=None, body_loaded=False, lease_s=2.0)).only(c.FetchBody)
    stage.wait(1.0)
    stage.fail_renewal()
    stage.wait(0.99)
    assert isinstance(stage.settlements()[0].settlement, Release)
    assert not stage.tell(e.BodyFetched(Q, fetch.claim_id, True, b"{}")).all(c.Dispatch)


def test_a_dispatch_says_what_the_row_said() -> None:
    """Every field in its place: all values differ. Attempts are deliveries without the refunds, and never below 1."""
    stage = Stage(queue(hard_timeout_s=20.0)).start()
    claimed = row(
        7,
        6,
        lease_s=25.0,
        enqueued_us=8,
        visible_us=9,
        headers=b'{"a": 1}',
        accounts=accounts(7, refunds=2),
        body=b"[10]",
        body_bytes=4,
    )
    dispatch = stage.give(claimed).only(c.Dispatch)
    assert dispatch == c.Dispatch(
        child=stage.children()[0],
        claim_id=dispatch.claim_id,
        msg_id=7,
        attempt=4,
        deliveries=6,
        enqueued_us=8,
        hard_timeout_s=20.0,
        headers=b'{"a": 1}',
        body=b"[10]",
        lease_deadline=stage.now + 25.0,
    )
    below = Stage().start().give(row(1, -5, body=None)).only(c.Dispatch)
    assert (below.attempt, below.deliveries, below.headers, below.body) == (1, -5, None, None)


def test_a_body_that_no_frame_can_carry_is_dead_lettered() -> None:
    """With a clear reason, not in a loop."""
    stage = Stage().start()
    fetch = stage.give(row(1, body=None, body_loaded=False)).only(c.FetchBody)
    stage.tell(e.BodyFetched(Q, fetch.claim_id, True, _Huge()))
    settlement = stage.settlements()[0].settlement
    assert isinstance(settlement, DeadLetter)
    assert "MessageTooLarge" in settlement.envelope


class _Huge(bytes):
    def __len__(self) -> int:
        return MAX_BODY_BYTES


def test_a_body_that_comes_for_a_killed_child_waits_for_another() -> None:
    """Protocol rubbish from an idle child that was reserved."""
    stage = Stage(queue(concurrency=2)).start()
    fetch = stage.give(row(1, body=None, body_loaded=False)).only(c.FetchBody)
    child = next(each for each in stage.look().children if each.state == "reserved").child
    stage.tell(e.ProtocolBroken(child, "rubbish"))  # type: ignore[arg-type]
    assert not stage.tell(e.BodyFetched(Q, fetch.claim_id, True, b"[1]")).all(c.Dispatch)
    dispatch = stage.die(child, signal="SIGKILL").only(c.Dispatch)  # type: ignore[arg-type]
    assert (dispatch.body, dispatch.attempt) == (b"[1]", 1)


# --- giving back ------------------------------------------------------------------------------------------------------


def test_what_waits_is_given_back_when_work_turned_slow() -> None:
    """Fast messages held ahead, then the child gets a 20-minute one: the rest runs elsewhere within seconds."""
    stage = fast(Stage().start())
    stage.give(row(1), row(2), row(3))
    stage.wait(4.9)
    assert not stage.settlements()
    stage.wait(0.1)
    assert [item.settlement for item in stage.settlements()] == [Release(RELEASED.format(n), 0) for n in (2, 3)]
    stage.settle()
    assert [happening.reason for happening in stage.told(h.MessageReleased)] == ["slow", "slow"]


def test_after_work_turned_slow_less_is_held_ahead() -> None:
    """Until faster work is measured again."""
    stage = fast(Stage().start())
    dispatch, *_ = stage.run_all(row(1), row(2))
    stage.wait(5.0)
    stage.finish(dispatch)
    assert stage.only(c.Claim).limit == 1


def test_nothing_waits_beyond_its_first_renewal() -> None:
    """Short leases are not renewed for messages that nobody runs."""
    stage = fast(Stage(queue(visibility_timeout_s=2.0)).start())
    stage.give(row(1, lease_s=2.0), row(2, lease_s=2.0))
    stage.wait(1.0)
    assert [item.fence.msg_id for item in stage.settlements()] == [2]


def test_a_claim_whose_answer_came_too_late_is_given_back() -> None:
    """Half of its leases are over before anybody could begin."""
    stage = Stage().start()
    stage.now += 16.0
    stage.give(row(1))
    assert stage.settlements()[0].settlement == Release(RELEASED.format(1), 0)


def test_a_pause_gives_back_what_no_child_has() -> None:
    """Running messages finish; what a claim under way still brings goes back too."""
    stage = fast(Stage().start())
    dispatch, *_ = stage.run_all(row(1), row(2))
    stage.tell(e.PauseChanged(Q, True))
    assert [item.fence.msg_id for item in stage.settlements()] == [2]
    assert len(stage.told(h.QueuePaused)) == 1
    stage.finish(dispatch)
    assert not stage.all(c.Claim)
    assert stage.look().paused
    assert not stage.tell(e.PauseChanged(Q, True)).last

    stage = Stage().start()
    stage.tell(e.PauseChanged(Q, True))
    stage.give(row(1))
    stage.settle()
    assert stage.told(h.MessageReleased)[0].reason == "paused"
    stage.tell(e.PauseChanged(Q, False))
    assert stage.all(c.Claim)
    assert len(stage.told(h.QueueResumed)) == 1


def test_a_pause_gives_back_what_is_still_loading() -> None:
    """And a message whose child dies before it starts is not sent to the next one."""
    stage = Stage().start()
    stage.give(row(1, body=None, body_loaded=False))
    stage.tell(e.PauseChanged(Q, True))
    assert [item.fence.msg_id for item in stage.settlements()] == [1]
    assert stage.states() == ["idle"]

    stage = Stage(queue(concurrency=2)).start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.tell(e.PauseChanged(Q, True))
    stage.die(dispatch.child)
    assert not stage.all(c.Dispatch)
    assert isinstance(stage.settlements()[0].settlement, Release)


# --- when -------------------------------------------------------------------------------------------------------------


def test_a_queue_is_read_until_it_is_empty() -> None:
    """Then only polled, with jitter."""
    stage = Stage(queue(concurrency=1, polling_interval_s=5.0)).start()
    stage.finish(stage.run(row(1)))
    assert stage.all(c.Claim)
    stage.give()
    stage.wait(3.9)
    assert not stage.all(c.Claim)
    stage.wait(2.2)
    assert stage.all(c.Claim)
    assert [happening.source for happening in stage.told(h.WokenUp)] == ["poll"]


def test_a_notification_is_only_a_nudge() -> None:
    """Read at once, and once more when PGMQ's throttle has passed, since it swallows what comes right behind."""
    stage = Stage(queue(polling_interval_s=60.0)).start()
    stage.give()
    stage.tell(e.Notified(Q))
    assert stage.all(c.Claim)
    stage.give()
    stage.wait(0.2)
    assert not stage.all(c.Claim)
    stage.wait(0.1)
    assert stage.all(c.Claim)


def test_a_notification_during_a_read_is_not_lost() -> None:
    """The read may have looked before the row was there."""
    stage = Stage(queue(polling_interval_s=60.0)).start()
    stage.tell(e.Notified(Q))
    stage.give()
    assert stage.all(c.Claim)


def test_a_timer_is_set_for_the_next_message_to_come() -> None:
    """Sent with a delay of 3 s to an idle worker that polls each 60 s: it starts at 3 s."""
    stage = Stage(queue(polling_interval_s=60.0)).start()
    stage.give(next_visible_s=3.0)
    stage.wait(2.99)
    assert not stage.all(c.Claim)
    stage.wait(0.02)
    assert stage.all(c.Claim)
    assert stage.told(h.WokenUp)[0].source == "timer"


def test_after_a_reconnect_all_is_read() -> None:
    """What came meanwhile was not heard."""
    stage = Stage(queue(polling_interval_s=60.0)).start()
    stage.give()
    stage.tell(e.ListenerDown("gone"))
    assert not stage.look().listener_up
    stage.tell(e.ListenerUp((Q,)))
    assert stage.look().listener_up
    assert stage.all(c.Claim)


def test_a_database_that_is_away_is_asked_with_growing_pauses() -> None:
    """Said once; and once more when it is back."""
    timing = Timing(claim_backoff_base_s=1.0, claim_backoff_max_s=4.0)
    stage = Stage(timing=timing).start()
    stage.fail_claim()
    assert len(stage.told(h.ClaimingFailed)) == 1
    assert stage.look().database_error == "connection refused"
    for pause_s in (0.75, 1.5, 3.0, 3.0):
        stage.wait(pause_s - 0.01)
        assert not stage.all(c.Claim)
        stage.wait(0.02)
        assert stage.all(c.Claim)
        stage.fail_claim()
        assert not stage.told(h.ClaimingFailed)
    stage.wait(4.0)
    stage.give()
    assert len(stage.told(h.ClaimingRecovered)) == 1
    assert stage.look().database_error is None


@pytest.mark.parametrize("event", [e.Notified(QueueName("other")), e.PauseChanged(QueueName("other"), True)])
def test_what_is_told_of_other_queues_is_not_for_us(event: e.Event) -> None:
    """A channel or a row of a queue that this supervisor does not serve."""
    assert not Stage().start().tell(event).last


# --- claims that overlap ---------------------------------------------------------------------------------------------


def long_queue(concurrency: int) -> Stage:
    """Quick work, and claims that brought as many messages as they asked for."""
    stage = fast(Stage(queue(concurrency=concurrency, claim_batch_size=10)).start(), estimate_s=0.0005)
    for first in (100, 200):
        assert stage.claiming is not None
        stage.give(*(row(first + n) for n in range(stage.claiming.limit)))
    return stage


def claims_under_way(stage: Stage) -> list[c.Claim]:
    """All that are not answered."""
    return list(stage._claims)


def test_a_long_queue_is_claimed_twice_at_once() -> None:
    """The second claim is on its way while the first is under way; there is never a third."""
    stage = long_queue(4)
    assert [claim.limit for claim in claims_under_way(stage)] == [10, 10]
    stage.give(*(row(2000 + i) for i in range(10)))
    assert len(claims_under_way(stage)) == 2


def test_one_child_is_served_in_the_order_of_its_queue() -> None:
    """The answers of two claims could overtake each other."""
    assert len(claims_under_way(long_queue(1))) == 1


def test_the_end_of_a_queue_is_claimed_once_at_a_time() -> None:
    """A claim that brought less than it asked for has seen the end."""
    stage = long_queue(4)
    stage.give(row(2000))
    stage.give()
    assert len(claims_under_way(stage)) <= 1


def test_a_notification_during_two_claims_is_not_forgotten_by_the_first_answer() -> None:
    """The other one may have looked before the message was there."""
    stage = long_queue(4)
    stage.tell(e.Notified(Q))
    stage.give(row(2000))
    stage.give()
    assert claims_under_way(stage), "read again"


def test_an_older_look_that_found_nothing_says_nothing() -> None:
    """What a producer has committed between two claims was found by the younger one: the queue is still long."""
    stage = long_queue(4)
    stage.wait(0.001).give(*(row(2000 + n) for n in range(10)))  # the next one is asked for, the second is under way
    stage.give(*(row(3000 + n) for n in range(10)), which=1)
    stage.give()
    assert stage.core._queues[Q].wakeups.hungry
    assert claims_under_way(stage), "it goes on without waiting for the poll"


def test_two_claims_that_fail_together_are_one_failure() -> None:
    """The pause before the next one does not grow twice; and the next one goes alone."""
    stage = long_queue(4)
    stage.fail_claim()
    first = stage.core._queues[Q].claim_not_before
    stage.fail_claim()
    assert stage.core._queues[Q].claim_not_before == first
    stage.wait(1.0)
    assert len(claims_under_way(stage)) == 1


def test_one_queue_at_a_time_has_two_claims() -> None:
    """Each costs a session and the bodies of a claim; other queues must find both."""
    stage = Stage(*(queue(name, concurrency=4, claim_batch_size=10) for name in ("q", "r"))).start()
    for machine in stage.core._queues.values():
        machine.pacing.estimate_s = 0.0005  # type: ignore[attr-defined]
    for first in (100, 200, 300, 400):
        claim = stage.claiming
        assert claim is not None
        stage.give(*(row(first + n) for n in range(claim.limit)))
    names = [claim.queue for claim in claims_under_way(stage)]
    assert len(names) == 3
    assert set(names) == {"q", "r"}

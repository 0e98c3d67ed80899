"""Settling: repeated after a failure until the lease is over, never told before it is so."""

from __future__ import annotations

import pytest

from shared.pgmq.records import DeadLetter, Release, Retry, SettleFailure, SettleOutcome, SettleResult
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.types import Outcome, OutcomeKind
from tests.unit.core.stage import Q, Stage, queue, row

REJECT = Outcome(OutcomeKind.REJECT)


def test_a_failed_settlement_is_tried_again_inside_the_lease() -> None:
    """The same item, since it is guarded by the fence and writes absolute values."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)))
    (item,) = stage.settlements()
    for pause_s in (0.1, 0.2, 0.4, 0.8):
        stage.settle(SettleOutcome.FAILED)
        assert len(stage.told(h.SettlementFailed)) == 1
        assert not stage.settlements()
        stage.wait(pause_s)
        assert stage.settlements() == [item]
    stage.settle()
    assert len(stage.told(h.MessageSucceeded)) == 1


def test_a_settlement_that_fails_to_the_end_is_left_to_its_lease() -> None:
    """No success is claimed; the message returns."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)))
    lapsed = []
    for _ in range(60):
        if stage.settlements():
            stage.settle(SettleOutcome.FAILED)
            lapsed += stage.told(h.SettlementLapsed)
        stage.wait(1.0)
    assert [happening.wanted for happening in lapsed] == ["success"]
    assert stage.look().settling == 0
    assert not stage.told(h.MessageSucceeded)


def test_a_dead_letter_that_can_never_be_moved_stays_in_its_queue_for_a_long_while() -> None:
    """Nothing else would keep it; loud, and looked at seldom, so that it is no hot loop."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)), REJECT)
    stage.settle(SettleOutcome.FAILED, SettleFailure.IMPOSSIBLE)
    assert [happening.wanted for happening in stage.told(h.SettlementLapsed)] == ["dead_letter"]
    (item,) = stage.settlements()
    assert item.settlement == Retry(600_000, None)
    stage.settle(SettleOutcome.FAILED, SettleFailure.IMPOSSIBLE)
    assert stage.look().settling == 0, "not for ever"


def test_a_retry_whose_accounts_cannot_be_written_is_made_without_them() -> None:
    """Its deaths are not kept, its deliveries still count: attempts end, and the backoff holds."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.die(dispatch.child, signal="SIGSEGV")
    (item,) = stage.settlements()
    assert isinstance(item.settlement, Retry)
    assert item.settlement.accounts is not None
    stage.settle(SettleOutcome.FAILED, SettleFailure.IMPOSSIBLE)
    (again,) = stage.settlements()
    assert again.settlement == Retry(item.settlement.delay_ms, None)
    stage.settle()
    assert [happening.reason for happening in stage.told(h.MessageRetried)] == ["signal"]


def test_a_success_that_an_outage_kept_from_the_database_is_refunded_after_its_lease() -> None:
    """No success is claimed, and no attempt is counted."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)))
    for _ in range(60):
        if stage.settlements() and isinstance(stage.settlements()[0].settlement, Release):
            break
        if stage.settlements():
            stage.settle(SettleOutcome.FAILED, SettleFailure.AWAY)
        stage.wait(1.0)
    stage.settle()
    assert [happening.reason for happening in stage.told(h.MessageReleased)] == ["lease_lost"]


def test_what_an_outage_cost_is_given_back_before_anything_is_claimed_again() -> None:
    """A claim of our own would make an attempt of a refund that is still on its way."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.wait(29.5)
    stage.die(dispatch.child, signal="SIGKILL").ready()
    stage.settle(SettleOutcome.FAILED, SettleFailure.AWAY)
    assert stage.look().database_error
    stage.wait(20.0)
    assert stage.claiming is None
    stage.settle()
    assert [happening.reason for happening in stage.told(h.MessageReleased)] == ["lease_lost"]
    assert stage.claiming is not None
    assert stage.look().database_error is None


def test_a_refund_outlives_its_lease() -> None:
    """Only the fence is needed: nobody can have claimed the message since."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.wait(29.0)
    stage.die(dispatch.child, signal="SIGKILL")
    for _ in range(30):
        if stage.settlements():
            assert isinstance(stage.settlements()[0].settlement, Release)
            stage.settle(SettleOutcome.FAILED)
        stage.wait(5.0)
    stage.settle()
    assert [happening.reason for happening in stage.told(h.MessageReleased)] == ["lease_lost"]


def test_one_failing_message_holds_up_no_other() -> None:
    """A missing dead-letter queue must not roll back the acks beside it."""
    stage = Stage(queue(concurrency=2)).start()
    first, second = stage.run_all(row(1), row(2))
    stage.finish(first, REJECT)
    stage.settle(SettleOutcome.FAILED)
    stage.finish(second).wait(0.01)
    stage.settle()
    assert [happening.msg_id for happening in stage.told(h.MessageSucceeded)] == [2]
    stage.wait(0.2)
    (item,) = stage.settlements()
    assert isinstance(item.settlement, DeadLetter)


def test_a_child_is_free_while_its_message_is_being_settled() -> None:
    """The settlement belongs to the parent."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)))
    assert stage.claiming is not None
    assert stage.give(row(2)).only(c.Dispatch).msg_id == 2
    assert stage.look().settling == 1


@pytest.mark.parametrize("outcome", list(SettleOutcome))
def test_an_answer_for_nobody_says_nothing(outcome: SettleOutcome) -> None:
    """Given up meanwhile, or never asked."""
    stage = Stage().start()
    assert not stage.tell(e.Settled(Q, (SettleResult(999, outcome),))).last


def test_the_queue_is_read_when_a_retried_message_is_due() -> None:
    """Nothing notifies when a delay runs out, and a poll may be a minute away."""
    stage = Stage(queue(polling_interval_s=60.0)).start()
    stage.finish(stage.run(row(1)), Outcome(OutcomeKind.RETRY, delay_ms=3_000))
    stage.settle()
    stage.give()
    stage.wait(2.9)
    assert not stage.all(c.Claim)
    stage.wait(0.2)
    assert stage.all(c.Claim)


def test_a_refund_whose_row_was_locked_goes_along_when_the_message_is_claimed_again() -> None:
    """Whoever is first when the lock goes, the refund or our own next claim: the attempt stays the same."""
    stage = Stage(queue(visibility_timeout_s=10.0)).start()
    dispatch = stage.run(row(1))
    stage.now += 11.0
    stage.finish(dispatch)
    assert isinstance(stage.settlements()[0].settlement, Release)
    stage.settle(SettleOutcome.FAILED)
    stage.wait(0.01)
    assert stage.run(row(1, read_ct=2)).attempt == 1
    assert stage.look().settling == 0


# --- acknowledgements that are gathered ------------------------------------------------------------------------------


def finished_together(count: int, after_s: float = 0.001) -> Stage:
    """Messages that each kept their child for `after_s` and succeeded in the same moment."""
    stage = Stage(queue(concurrency=count)).start()
    dispatches = stage.run_all(*(row(n) for n in range(1, count + 1)))
    stage.wait(after_s)
    stage.finish(dispatches[0])
    assert len(stage.settlements()) == 1, "nothing was said just before: it does not wait"
    for dispatch in dispatches[1:]:
        stage.finish(dispatch)
    return stage


def test_acknowledgements_of_quick_work_go_together() -> None:
    """One statement for those that end within ten milliseconds."""
    stage = finished_together(4)
    assert not stage.settlements()
    stage.wait(0.01)
    (command,) = stage.all(c.Settle)
    assert [item.fence.msg_id for item in command.items] == [2, 3, 4]
    assert stage.look().settling == 4


def test_acknowledgements_of_slower_work_do_not_wait() -> None:
    """What a crash would repeat of it is worth more than a statement."""
    stage = finished_together(2, after_s=0.02)
    assert [item.fence.msg_id for item in stage.settlements()] == [2]


def test_other_verdicts_do_not_wait_and_take_along_what_does() -> None:
    """A dead letter, a retry or a refund is said at once."""
    stage = Stage(queue(concurrency=3)).start()
    one, two, three = stage.run_all(row(1), row(2), row(3))
    stage.finish(one).finish(two)
    assert not stage.settlements()
    stage.finish(three, REJECT)
    assert [item.fence.msg_id for item in stage.settlements()] == [2, 3]
    stage.wait(0.05)
    assert not stage.settlements(), "nothing is said twice"


def test_nothing_waits_in_a_drain() -> None:
    """The end must not come before what was gathered is said, and nothing is gathered any more."""
    stage = Stage(queue(concurrency=3)).start()
    one, two, three = stage.run_all(row(1), row(2), row(3))
    stage.finish(one).finish(two)
    stage.tell(e.ShutdownRequested())
    assert [item.fence.msg_id for item in stage.settlements()] == [2]
    stage.finish(three)
    assert [item.fence.msg_id for item in stage.settlements()] == [3]


@pytest.mark.parametrize(
    "orders", [(e.EscalationRequested(),), (e.ShutdownRequested(), e.EscalationRequested()), (e.ShutdownRequested(),)]
)
def test_what_was_gathered_is_said_before_acknowledgements_are_off(orders: tuple[e.Event, ...]) -> None:
    """A grace period of nothing, or a second signal at once: said with the first order, and never after the last."""
    stage = Stage(queue(concurrency=2), grace_s=0.0, kill_after_s=1.0).start()
    one, two = stage.run_all(row(1), row(2))
    stage.finish(one).finish(two)
    said = []
    for order in orders:
        said += [item.fence.msg_id for item in stage.tell(order).settlements()]
    assert said == [2]
    stage.wait(0.05)
    assert not stage.settlements()

"""Leases: renewed half way, lost in three ways, and never outlived by a child."""

from __future__ import annotations

from shared.pgmq.records import Ack, AckMode, Release, RenewOutcome
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.types import DeathCause, StopReason
from tests.unit.core.stage import Stage, queue, row


def test_a_lease_counts_from_before_the_query() -> None:
    """A slow answer shortens it; a clock that ran on between only shortens it too."""
    stage = Stage().start()
    asked_at = stage.now
    stage.wait(2.0)
    assert stage.give(row(1, lease_s=29.0)).only(c.Dispatch).lease_deadline == asked_at + 29.0

    stage = Stage().start()
    asked_at = stage.now
    assert stage.give(row(1, lease_s=99.0)).only(c.Dispatch).lease_deadline == asked_at + 30.0


def test_leases_are_renewed_about_half_way() -> None:
    """In one statement; the guard hears the new deadline."""
    stage = Stage(queue(concurrency=2)).start()
    first, second = stage.run_all(row(1), row(2))
    stage.wait(13.4)
    assert not stage.all(c.Renew)
    stage.wait(3.1)
    renewal = stage.only(c.Renew)
    assert [fence.msg_id for _claim, fence in renewal.fences] == [1, 2]
    assert renewal.lease_s == 30.0
    asked_at = stage.now - 1.5  # it was asked when it was due, at half of the lease
    stage.renew()
    assert stage.only(c.GuardLeases).deadlines == ((first.child, asked_at + 30.0), (second.child, asked_at + 30.0))
    assert stage.told(h.LeasesRenewed)[0].count == 2


def test_a_renewal_has_less_time_than_the_shortest_lease() -> None:
    """A statement that hangs near the deadline must leave time for another."""
    stage = Stage().start()
    stage.run(row(1))
    stage.wait(15.0)
    assert stage.only(c.Renew).timeout_s == 5.0


def test_a_failed_renewal_is_not_a_lost_lease() -> None:
    """The next tick still runs: again and again until the deadline, nothing aborted, nothing charged."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.wait(15.0)
    for _ in range(5):
        stage.fail_renewal()
        assert len(stage.told(h.LeaseRenewalFailed)) == 1
        stage.wait(2.0)
        assert stage.all(c.Renew)
        assert not stage.all(c.KillChild)
    stage.renew()
    assert not stage.all(c.SendStop)
    assert stage.finish(dispatch).settlements()[0].settlement == Ack(AckMode.DELETE)


def test_a_busy_row_is_asked_again() -> None:
    """Somebody's session locks it: the lease stands."""
    stage = Stage().start()
    stage.run(row(1))
    stage.wait(15.0)
    stage.renew(RenewOutcome.BUSY)
    assert not stage.all(c.SendStop)
    stage.wait(2.0)
    assert stage.all(c.Renew)


def test_a_child_is_killed_before_its_lease_runs_out() -> None:
    """The local deadline wins, also over a renewal that hangs; the message is refunded where nobody has claimed it."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.wait(28.9)
    assert not stage.all(c.KillChild)
    stage.wait(0.1)
    assert stage.only(c.KillChild).child == dispatch.child
    stage.die(dispatch.child, signal="SIGKILL")
    (ended,) = stage.told(h.ChildEnded)
    assert (ended.cause, ended.charged) == (DeathCause.LEASE_LOST, False)
    assert stage.settlements()[0].settlement == Release('{"queue":"q","msg_id":1,"refunds":1,"deaths":0}', 0)


def test_the_owner_of_a_lost_lease_only_offers_it_back() -> None:
    """A renewal that matches no row: acks off, stop request, KILL after a second; then a refund under the fence alone.

    The database refuses the refund unless nobody has claimed the message since: then it is back at once, uncharged.
    """
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.wait(15.0)
    stage.renew(RenewOutcome.LOST)
    assert stage.only(c.SendStop).reason is StopReason.LEASE_LOST
    assert len(stage.told(h.LeaseLost)) == 1
    stage.wait(1.0)
    assert stage.only(c.KillChild).child == dispatch.child
    stage.die(dispatch.child, signal="SIGKILL")
    assert [type(item.settlement) for item in stage.settlements()] == [Release]


def test_a_result_after_the_loss_is_not_acknowledged() -> None:
    """Somebody else may own the message now: nothing but a refund under the fence."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.wait(15.0)
    stage.renew(RenewOutcome.LOST)
    stage.finish(dispatch)
    assert [type(item.settlement) for item in stage.settlements()] == [Release]
    assert stage.states() == ["idle"]


def test_a_result_that_comes_too_late_is_only_refunded() -> None:
    """The parent was frozen beyond the lease: no ack, retry or dead letter by the stale owner."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.now += 31.0
    stage.finish(dispatch)
    assert isinstance(stage.settlements()[0].settlement, Release)
    assert len(stage.told(h.LeaseLost)) == 1


def test_what_has_a_verdict_is_no_longer_renewed() -> None:
    """Its settlement decides."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)))
    stage.wait(25.0)
    assert not stage.all(c.Renew)


def test_a_lease_is_kept_while_its_child_is_being_killed() -> None:
    """The parent settles the death, so it must own the message until then."""
    stage = Stage(queue(hard_timeout_s=14.0)).start()
    stage.run(row(1))
    stage.wait(14.0)
    assert stage.states() == ["killed"]
    stage.wait(1.0)
    assert stage.all(c.Renew)


def test_only_one_renewal_is_under_way() -> None:
    """One statement at a time on a connection that nothing else uses."""
    stage = Stage(queue(concurrency=2)).start()
    stage.run(row(1))
    stage.wait(8.0)
    stage.run(row(2))
    stage.wait(15.0)
    assert len(stage.all(c.Renew)) == 1


def test_short_leases_leave_a_margin_too() -> None:
    """A tenth of the lease where that is less than a second."""
    stage = Stage(queue(visibility_timeout_s=1.0)).start()
    stage.run(row(1, lease_s=1.0))
    stage.wait(0.89)
    assert not stage.all(c.KillChild)
    stage.wait(0.02)
    assert stage.all(c.KillChild)


def test_overdue_renewals_show() -> None:
    """For /livez: the loop does not make progress."""
    stage = Stage().start()
    stage.run(row(1))
    assert stage.look().overdue_renewals == 0
    stage.now += 25.0
    assert stage.look().overdue_renewals == 1
    assert stage.look().lease_margin_s == 5.0


def test_a_message_whose_body_is_loading_loses_its_lease() -> None:
    """It was never given to a child; the child is free again."""
    stage = Stage(queue(visibility_timeout_s=4.0)).start()
    fetch = stage.give(row(1, body=None, body_loaded=False, body_bytes=9, lease_s=4.0)).only(c.FetchBody)
    stage.wait(2.0)
    stage.renew(RenewOutcome.LOST)
    assert stage.states() == ["idle"]
    assert not stage.settlements()
    assert not stage.tell(e.BodyFetched(fetch.queue, fetch.claim_id, True, b"{}")).all(c.Dispatch)

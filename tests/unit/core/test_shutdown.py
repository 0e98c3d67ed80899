"""Drain, grace, escalation and the exit code."""

from __future__ import annotations

import pytest

from shared.pgmq.records import Ack, AckMode, Release, SettleOutcome
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.types import SUCCESS, DeathCause, StopReason
from tests.unit.core.stage import FAILURE, Q, Stage, accounts, queue, row, transactional

REFUND = '{{"queue":"q","msg_id":{},"refunds":1,"deaths":0}}'


def test_an_idle_supervisor_stops_at_once() -> None:
    """Children are asked to end; code 0."""
    stage = Stage(queue(concurrency=2)).start()
    stage.give()
    stage.tell(e.ShutdownRequested())
    assert len(stage.all(c.SendExit)) == 2
    for child in stage.children():
        stage.die(child, exit_code=0)
    assert stage.only(c.Exit).code == 0
    (ended,) = stage.told(h.ShutdownEnded)
    assert (ended.timed_out, ended.killed) == (False, 0)
    assert stage.core.next_deadline() == float("inf")
    assert not stage.tell(e.ShutdownRequested()).last


def test_what_was_not_started_is_given_back_unchanged() -> None:
    """TERM with claimed and unstarted messages: each visible again at once, attempts unchanged."""
    stage = Stage().start()
    stage.core._queues[Q].pacing.estimate_s = 0.001  # type: ignore[attr-defined]
    dispatch, *_ = stage.run_all(row(1), *[row(n) for n in range(2, 50)])
    stage.tell(e.ShutdownRequested())
    assert [item.settlement for item in stage.settlements()] == [Release(REFUND.format(n), 0) for n in range(2, 50)]
    (started,) = stage.told(h.ShutdownStarted)
    assert (started.in_flight, started.waiting) == (49, 48)
    assert stage.only(c.SendStop) == c.SendStop(dispatch.child, dispatch.claim_id, StopReason.SHUTDOWN)


def test_a_claim_that_is_under_way_is_awaited() -> None:
    """What it brings must be given back, or it would wait for its leases."""
    stage = Stage().start()
    stage.tell(e.ShutdownRequested())
    stage.die(*stage.children(), exit_code=0)
    assert not stage.all(c.Exit)
    stage.give(row(1))
    assert stage.settlements()[0].settlement == Release(REFUND.format(1), 0)
    assert stage.settle().only(c.Exit).code == 0


def test_a_message_whose_body_is_loading_is_given_back() -> None:
    """Nobody has begun with it."""
    stage = Stage().start()
    stage.give(row(1, body=None, body_loaded=False))
    stage.tell(e.ShutdownRequested())
    assert [item.fence.msg_id for item in stage.settlements()] == [1]
    assert stage.all(c.SendExit)


def test_running_messages_may_finish_and_are_renewed() -> None:
    """Within the grace period a success is a success."""
    stage = Stage(grace_s=60.0).start()
    dispatch = stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(16.0)
    stage.renew()
    assert stage.all(c.GuardLeases)
    stage.wait(10.0)
    stage.finish(dispatch)
    assert stage.settlements()[0].settlement == Ack(AckMode.DELETE)
    assert stage.only(c.SendExit).child == dispatch.child
    stage.settle()
    assert not stage.all(c.Exit)
    assert stage.die(dispatch.child, exit_code=0).only(c.Exit).code == 0


def test_no_new_work_is_taken() -> None:
    """No claim, no child, whatever happens."""
    stage = Stage(queue(concurrency=2)).start()
    dispatch = stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.tell(e.Notified(Q), e.PauseChanged(Q, False), e.ListenerUp((Q,)))
    stage.die(dispatch.child)
    assert not stage.all(c.StartChild)
    assert not stage.all(c.Claim)


def test_children_that_were_starting_are_ended() -> None:
    """Nobody waits for their imports."""
    stage = Stage()
    stage.tell(e.Started())
    stage.tell(e.ShutdownRequested())
    assert stage.all(c.KillChild)
    assert stage.die(*stage.children(), signal="SIGKILL").only(c.Exit).code == 0
    assert not stage.told(h.ChildFailedToStart)


def test_a_stop_before_the_start_is_clean() -> None:
    """TERM while the database is still being looked at."""
    assert Stage().tell(e.ShutdownRequested()).only(c.Exit).code == 0


def test_a_message_whose_child_dies_before_it_starts_is_given_back() -> None:
    """To no other child now."""
    stage = Stage(queue(concurrency=2)).start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.tell(e.ShutdownRequested())
    stage.die(dispatch.child)
    assert not stage.all(c.Dispatch)
    assert stage.settlements()[0].settlement == Release(REFUND.format(1), 0)


# --- grace ------------------------------------------------------------------------------------------------------------


def test_after_the_grace_period_children_are_terminated_then_killed() -> None:
    """TERM, a step, KILL, all within kill_after; killed work is released and refunded; exit 3."""
    stage = Stage(grace_s=5.0, kill_after_s=5.0).start()
    dispatch = stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(4.9)
    assert not stage.all(c.SendTerm)
    stage.wait(0.1)
    assert stage.only(c.SendTerm).child == dispatch.child
    assert stage.wait(1.0).only(c.KillChild).child == dispatch.child
    assert stage.told(h.ShutdownEscalated)[0] == h.ShutdownEscalated("grace", 1)
    stage.die(dispatch.child, signal="SIGKILL")
    assert stage.told(h.ChildEnded)[0].cause is DeathCause.SHUTDOWN
    assert stage.settlements()[0].settlement == Release(REFUND.format(1), 0)
    assert stage.settle().only(c.Exit).code == 3
    (ended,) = stage.told(h.ShutdownEnded)
    assert (ended.timed_out, ended.killed) == (True, 1)


@pytest.mark.parametrize("outcome", [SUCCESS, FAILURE])
def test_nothing_is_acknowledged_after_the_grace_period(outcome: object) -> None:
    """Also what finishes in the last moment: it is refunded, and nobody had to be killed."""
    stage = Stage(grace_s=5.0).start()
    dispatch = stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(5.0)
    stage.finish(dispatch, outcome)  # type: ignore[arg-type]
    assert stage.settlements()[0].settlement == Release(REFUND.format(1), 0)
    stage.settle()
    assert stage.die(dispatch.child, exit_code=0).only(c.Exit).code == 0


def test_a_death_after_the_grace_period_is_not_charged() -> None:
    """It would not have run on."""
    stage = Stage(grace_s=5.0).start()
    dispatch = stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(5.0)
    stage.die(dispatch.child)
    assert stage.settlements()[0].settlement == Release(REFUND.format(1), 0)


def test_twenty_rolling_restarts_dead_letter_nothing() -> None:
    """A long task that is killed at each deploy: read_ct grows, attempts do not."""
    for refunds in range(20):
        stage = Stage(queue(max_attempts=3), grace_s=1.0).start()
        dispatch = stage.run(row(1, refunds + 1, accounts=accounts(1, refunds=refunds)))
        assert dispatch.attempt == 1
        stage.tell(e.ShutdownRequested())
        stage.wait(2.0)
        stage.die(dispatch.child, signal="SIGKILL")
        (item,) = stage.settlements()
        assert isinstance(item.settlement, Release)
        assert f'"refunds":{refunds + 1}' in (item.settlement.accounts or "")


def test_a_stop_ends_in_time_whatever_the_database_does() -> None:
    """Grace and kill_after add up; what it did not take is left to its lease."""
    stage = Stage(grace_s=5.0, kill_after_s=2.0).start()
    stage.finish(stage.run(row(1)))
    stage.settle(SettleOutcome.FAILED)
    stage.tell(e.ShutdownRequested())
    began = stage.now
    stage.fail_claim()
    stage.die(*stage.children(), exit_code=0)
    while not stage.all(c.Exit):
        if stage.settlements():
            stage.settle(SettleOutcome.FAILED)
        stage.wait(0.1)
        assert stage.now - began < 7.2
    assert stage.only(c.Exit).code == 0
    assert [happening.wanted for happening in stage.told(h.SettlementLapsed)] == ["success"]


def test_a_stop_does_not_wait_for_an_unkillable_child() -> None:
    """It says so: exit 3."""
    stage = Stage(grace_s=1.0, kill_after_s=2.0).start()
    stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(3.0)
    assert stage.only(c.Exit).code == 3


# --- a second signal --------------------------------------------------------------------------------------------------


def test_a_second_signal_kills_now() -> None:
    """No TERM step; exit 3."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(2.0)
    stage.tell(e.EscalationRequested())
    assert stage.only(c.KillChild).child == dispatch.child
    assert stage.told(h.ShutdownEscalated)[0].why == "signal"
    stage.die(dispatch.child, signal="SIGKILL")
    assert stage.settle().only(c.Exit).code == 3


def test_a_second_signal_during_the_last_step_kills_now() -> None:
    """The grace period was just over."""
    stage = Stage(grace_s=1.0).start()
    stage.run(row(1))
    stage.tell(e.ShutdownRequested())
    stage.wait(1.0)
    assert stage.all(c.SendTerm)
    assert stage.tell(e.EscalationRequested()).all(c.KillChild)


def test_an_escalation_without_a_drain_is_one() -> None:
    """Whoever asks for it means it."""
    stage = Stage().start()
    stage.run(row(1))
    assert stage.tell(e.EscalationRequested()).all(c.KillChild)


# --- transactional ----------------------------------------------------------------------------------------------------


def test_a_transaction_may_commit_within_the_grace_period() -> None:
    """As in regular mode."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1)
    stage.tell(e.ShutdownRequested())
    stage.ask_commit(grant)
    assert stage.only(c.AnswerCommit).settlement == Ack(AckMode.DELETE)
    stage.tell(e.Committed(grant.child, grant.claim_id))
    assert stage.die(grant.child, exit_code=0).only(c.Exit).code == 0


def test_after_the_grace_period_commits_are_refused() -> None:
    """The rollback gives the message back uncharged."""
    stage = Stage(transactional(), grace_s=1.0).start()
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1)
    stage.tell(e.ShutdownRequested())
    stage.wait(1.0)
    stage.ask_commit(grant)
    assert stage.only(c.AnswerCommit).settlement is None
    stage.tx_end(grant)
    assert not stage.all(c.Reckon)
    assert stage.told(h.MessageReleased)[0].reason == "shutdown"


def test_killed_transactions_are_given_back_by_their_rollback() -> None:
    """Nothing is charged; the session is ended. Exit 3."""
    stage = Stage(transactional(), grace_s=1.0, kill_after_s=1.0).start()
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1)
    stage.tell(e.ShutdownRequested())
    stage.wait(1.5)
    stage.die(grant.child, signal="SIGKILL")
    assert stage.all(c.TerminateBackend)
    assert not stage.all(c.Reckon)
    assert stage.only(c.Exit).code == 3


def test_a_commit_that_was_granted_is_awaited() -> None:
    """A child that is about to commit does no harm in the last step; killed at its end, its row decides."""
    stage = Stage(transactional(), grace_s=1.0, kill_after_s=5.0).start()
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1)
    stage.tell(e.ShutdownRequested())
    stage.ask_commit(grant)
    stage.wait(4.4)
    assert not stage.all(c.KillChild)
    stage.wait(0.1)
    assert stage.all(c.KillChild)
    stage.die(grant.child, signal="SIGKILL")
    assert stage.all(c.Reckon)
    assert not stage.all(c.Exit)


def test_a_leap_of_time_leaves_nobody_alive() -> None:
    """The grace period and the last step pass at once: a child that is spared for its commit is killed at the end."""
    stage = Stage(transactional(), grace_s=1.0, kill_after_s=5.0).start()
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1)
    stage.tell(e.ShutdownRequested())
    stage.ask_commit(grant)
    stage.wait(1.0)
    assert stage.all(c.SendTerm)
    stage.now += 60.0
    stage.tell(e.StoodStill(60.0))
    assert [command.child for command in stage.all(c.KillChild)] == [grant.child]
    assert stage.only(c.Exit).code == 3

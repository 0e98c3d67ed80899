"""Transactional mode: permits, verdicts, and the reckoning of attempts whose commit nobody heard of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.pgmq.records import Ack, AckMode, DeadLetter, Fence, Reckoning, ReckonOutcome, Retry
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.accounts import MAX_DEADLOCKS_IN_A_ROW
from supervisor.core.delivery import Delivery
from supervisor.core.states import DeliveryState
from supervisor.core.types import SUCCESS, ErrorInfo, Outcome, OutcomeKind
from tests.unit.core.stage import FAILURE, TX, Q, Stage, accounts, transactional


def entry(msg_id: int = 1, *, refunds: int = 0, deaths: int = 0, **more: int) -> str:
    """The entry that a settlement writes."""
    numbers = {"queue": "q", "msg_id": msg_id, "refunds": refunds, "deaths": deaths, **more}
    return json.dumps(numbers, separators=(",", ":"))


def working(read_ct: int = 1, stored: str | None = None, **settings: Any) -> tuple[Stage, c.GrantPermit]:
    """One child works on message 1."""
    stage = Stage(transactional(**settings)).start()
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1, read_ct, stored)
    return stage, grant


# --- permits ----------------------------------------------------------------------------------------------------------


def test_permits_ramp_up_with_success() -> None:
    """An idle queue is asked by one child, a full one soon by all."""
    stage = Stage(transactional(concurrency=4)).start()
    first = stage.only(c.GrantPermit)
    stage.tx_claim(first, 1)
    second, third = stage.all(c.GrantPermit)
    stage.tx_claim(second, 2)
    assert len(stage.all(c.GrantPermit)) == 1
    stage.tell(e.PermitEmpty(third.child, third.claim_id, None))
    assert not stage.all(c.GrantPermit)


def test_an_empty_queue_is_polled_and_its_timer_kept() -> None:
    """As in regular mode."""
    stage = Stage(transactional(polling_interval_s=60.0)).start()
    grant = stage.only(c.GrantPermit)
    stage.tell(e.PermitEmpty(grant.child, grant.claim_id, 3.0))
    assert stage.states() == ["idle"]
    assert not stage.wait(2.9).all(c.GrantPermit)
    assert stage.wait(0.2).all(c.GrantPermit)


def test_empty_permits_do_not_wear_a_child_out() -> None:
    """max_tasks_per_child counts messages: an idle queue must not start a process at each poll."""
    stage = Stage(transactional(max_tasks_per_child=1)).start()
    for _ in range(5):
        grant = stage.only(c.GrantPermit)
        stage.tell(e.PermitEmpty(grant.child, grant.claim_id, None))
        assert not stage.all(c.StartChild)
        stage.tell(e.Notified(Q))
    stage.tx_claim(stage.only(c.GrantPermit), 1)
    assert stage.all(c.StartChild)


def test_a_claim_that_fails_backs_off() -> None:
    """The database is away: said once, nothing to reckon."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    error = ErrorInfo("OperationalError", "connection refused", "")
    stage.tell(e.TransactionEnded(grant.child, grant.claim_id, error, "08006", False, claimed=False))
    assert stage.told(h.ClaimingFailed)[0].error == "connection refused"
    assert not stage.all(c.GrantPermit)
    assert stage.wait(0.3).all(c.GrantPermit)


def test_a_child_that_dies_with_an_empty_permit_is_an_idle_death() -> None:
    """No message is charged, and a pool of children that die so is not restarted without a pause."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    stage.die(grant.child)
    assert len(stage.told(h.ChildFailedToStart)) == 1
    assert not stage.all(c.StartChild)
    assert not stage.all(c.Reckon)


def test_a_permit_without_an_answer_is_taken_back() -> None:
    """The child is killed, nobody charged."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    assert stage.wait(70.0).only(c.KillChild).child == grant.child
    stage.die(grant.child, signal="SIGKILL")
    assert not stage.all(c.Reckon)


def test_a_pause_grants_no_permits() -> None:
    """What runs may commit."""
    stage, grant = working()
    stage.tell(e.PauseChanged(Q, True))
    stage.ask_commit(grant)
    stage.tell(e.Committed(grant.child, grant.claim_id))
    assert not stage.all(c.GrantPermit)
    assert stage.tell(e.PauseChanged(Q, False)).all(c.GrantPermit)


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "read_ct", "settlement", "keeps"),
    [
        (SUCCESS, 1, Ack(AckMode.DELETE), True),
        (Outcome(OutcomeKind.SUCCESS, ack=AckMode.ARCHIVE), 1, Ack(AckMode.ARCHIVE), True),
        (FAILURE, 3, Retry(4_000, None), False),
        (Outcome(OutcomeKind.RETRY, delay_ms=50), 1, Retry(50, None), False),
    ],
)
def test_the_parent_decides_and_the_child_commits(
    outcome: Outcome, read_ct: int, settlement: object, keeps: bool
) -> None:
    """A success keeps the work; everything else goes back to the savepoint first."""
    stage, grant = working(read_ct)
    stage.ask_commit(grant, outcome)
    answer = stage.only(c.AnswerCommit)
    assert (answer.settlement, answer.keep_work, answer.read_ct) == (settlement, keeps, None)
    assert not stage.told(h.MessageSucceeded)
    stage.tell(e.Committed(grant.child, grant.claim_id))
    assert len(stage.told(h.MessageSucceeded) + stage.told(h.MessageRetried)) == 1
    assert stage.all(c.GrantPermit)


def test_the_last_attempt_is_dead_lettered_by_its_own_commit() -> None:
    """In the same transaction."""
    stage, grant = working(5)
    stage.ask_commit(grant, FAILURE)
    assert isinstance(stage.only(c.AnswerCommit).settlement, DeadLetter)


@pytest.mark.parametrize("how", ["outcome", "commit"])
def test_conflicts_are_retried_without_charge(how: str) -> None:
    """Deadlock and serialization failure, met by the handler or by the commit: at most ten in a row."""
    free = entry(refunds=1, deadlocks=1)
    stage, grant = working()
    if how == "outcome":
        stage.ask_commit(grant, Outcome(OutcomeKind.ERROR, sqlstate="40P01"))
        assert stage.only(c.AnswerCommit).settlement == Retry(1_000, free)
    else:
        stage.ask_commit(grant)
        stage.tx_end(grant, "40001")
        assert stage.only(c.Reckon).reckoning == Reckoning(1, 0, Retry(1_000, free))
    full = accounts(1, refunds=10, deadlocks=MAX_DEADLOCKS_IN_A_ROW)
    stage, grant = working(11, full)
    stage.ask_commit(grant, Outcome(OutcomeKind.ERROR, sqlstate="40001"))
    assert stage.only(c.AnswerCommit).settlement == Retry(1_000, entry(refunds=10))


def test_a_cancelled_attempt_that_meets_a_conflict_does_not_come_again() -> None:
    """The cancel wins."""
    stage, grant = working()
    stage.tell(e.CancelRequested(Q, 1))
    stage.tx_end(grant, "40001")
    settlement = stage.only(c.Reckon).reckoning.settlement
    assert isinstance(settlement, DeadLetter)
    assert json.loads(settlement.envelope)["reason"] == "cancelled"


def test_an_abandoned_attempt_is_refused_and_then_charged() -> None:
    """A rollback alone would bring it back at once: it comes after one visibility timeout, and counts."""
    stage, grant = working()
    stage.ask_commit(grant, Outcome(OutcomeKind.ABANDON))
    assert stage.only(c.AnswerCommit).settlement is None
    stage.tx_end(grant)
    assert len(stage.told(h.MessageAbandoned)) == 1
    assert stage.only(c.Reckon).reckoning == Reckoning(1, 0, Retry(30_000, entry()))


def test_a_cancelled_attempt_that_is_abandoned_is_dead_lettered() -> None:
    """It was asked to go for good."""
    stage, grant = working()
    stage.tell(e.CancelRequested(Q, 1))
    stage.ask_commit(grant, Outcome(OutcomeKind.ABANDON))
    assert isinstance(stage.only(c.AnswerCommit).settlement, DeadLetter)


# --- attempts without a commit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_an_attempt_without_a_commit_is_charged_afterwards(asked: bool) -> None:
    """Backend terminated, idle limit, deferred constraint at COMMIT: never a hot loop."""
    stage, grant = working()
    if asked:
        stage.ask_commit(grant)
    stage.tx_end(grant, "23505")
    question = stage.only(c.Reckon)
    assert question.reckoning == Reckoning(1, 0, Retry(1_000, entry()))
    assert question.tx == TX
    assert not stage.all(c.GrantPermit)  # the row is free now and must be charged first
    stage.reckon(question.claim_id, ReckonOutcome.DONE)
    assert stage.told(h.MessageRetried)[0].delay_ms == 1_000
    assert stage.all(c.GrantPermit)


def test_a_death_is_charged_after_its_rollback() -> None:
    """The session is ended first, if it is still in that transaction."""
    stage, grant = working(2, accounts(1, deaths=1), max_deaths=3)
    stage.die(grant.child)
    assert stage.only(c.TerminateBackend).tx == TX
    assert stage.only(c.Reckon).reckoning == Reckoning(1, 1, Retry(2_000, entry(deaths=2)))
    stage.reckon(grant.claim_id, ReckonOutcome.DONE)
    assert stage.told(h.MessageRetried)[0].reason == "signal"


def test_the_last_death_is_dead_lettered_after_its_rollback() -> None:
    """Also where read_ct rolls back each time."""
    stage, grant = working(2, accounts(1, deaths=1), max_deaths=2)
    stage.die(grant.child)
    settlement = stage.only(c.Reckon).reckoning.settlement
    assert isinstance(settlement, DeadLetter)
    stage.reckon(grant.claim_id, ReckonOutcome.DONE)
    assert len(stage.told(h.MessageDeadLettered)) == 1


def test_a_death_before_the_handler_is_written_down_and_refunded() -> None:
    """A claim that is only rolled back would come back for ever; it is free max_deaths times."""
    stage = Stage(transactional(max_deaths=1)).start()
    grant = stage.only(c.GrantPermit)
    stage.tell(e.TransactionClaimed(grant.child, grant.claim_id, 1, 1, 5, 5, None, TX))
    stage.die(grant.child)
    assert stage.only(c.Reckon).reckoning == Reckoning(1, 0, Retry(200, entry(refunds=1, early=1)))
    stage = Stage(transactional(max_deaths=1)).start()
    grant = stage.only(c.GrantPermit)
    stage.tell(e.TransactionClaimed(grant.child, grant.claim_id, 1, 2, 5, 5, accounts(1, refunds=1, early=1), TX))
    stage.die(grant.child)
    assert isinstance(stage.only(c.Reckon).reckoning.settlement, DeadLetter)


def test_an_unkillable_child_is_charged_too() -> None:
    """Its transaction can do no more harm; uncharged it would come back and take the next child, for ever."""
    stage, grant = working(hard_timeout_s=1.0)
    stage.wait(1.0)
    stage.wait(5.0)
    assert stage.all(c.AbandonChild)
    assert stage.all(c.TerminateBackend)
    assert stage.only(c.Reckon).reckoning == Reckoning(1, 0, Retry(1_000, entry(deaths=1)))
    assert stage.told(h.ChildUnkillable)
    stage.die(grant.child, signal="SIGKILL")
    assert not stage.all(c.Reckon)


def test_a_failed_reckoning_is_asked_again() -> None:
    """Until the database answers; no permit meanwhile."""
    stage, grant = working()
    stage.die(grant.child)
    for pause_s in (0.1, 0.2, 0.4):
        stage.reckon(grant.claim_id, ReckonOutcome.FAILED)
        assert not stage.all(c.Reckon)
        stage.wait(pause_s)
        assert stage.all(c.Reckon)
    assert stage.look().owed == 1


def test_a_reckoning_that_fails_tells_of_the_database() -> None:
    """Claims wait for it, so nobody else would: said once, not ready, and claims count as tried."""
    stage, grant = working()
    stage.tx_end(grant, "57P01")
    said = 0
    for _ in range(6):
        stage.reckon(grant.claim_id, ReckonOutcome.FAILED)
        said += len(stage.told(h.ClaimingFailed))
        assert stage.look().database_error
        assert stage.look().claims_attempted_at == stage.now
        assert not stage.wait(10.0).all(c.GrantPermit)
    assert said == 1
    stage.reckon(grant.claim_id, ReckonOutcome.DONE)
    second = stage.only(c.GrantPermit)
    stage.tell(e.PermitEmpty(second.child, second.claim_id, None))
    assert len(stage.told(h.ClaimingRecovered)) == 1
    assert stage.look().database_error is None


def test_a_row_that_is_gone_was_settled_by_somebody_else() -> None:
    """Nothing is claimed to have been done."""
    stage, grant = working()
    stage.die(grant.child)
    stage.reckon(grant.claim_id, ReckonOutcome.GONE)
    assert len(stage.told(h.SettlementLapsed)) == 1
    assert stage.look().owed == 0


# --- commits in doubt -------------------------------------------------------------------------------------------------


def in_doubt(outcome: Outcome = SUCCESS, *, dies: bool = False) -> tuple[Stage, c.GrantPermit]:
    """COMMIT was sent and its answer did not come."""
    stage, grant = working()
    stage.ask_commit(grant, outcome)
    if dies:
        stage.die(grant.child, signal="SIGKILL")
    else:
        stage.tx_end(grant, "08006", in_doubt=True)
    assert [happening.outcome for happening in stage.told(h.CommitInDoubt)] == ["unknown"]
    assert stage.only(c.Reckon).tx == TX
    return stage, grant


@pytest.mark.parametrize("dies", [False, True])
def test_a_row_that_is_gone_names_a_commit(dies: bool) -> None:
    """The row is the proof."""
    stage, grant = in_doubt(dies=dies)
    stage.reckon(grant.claim_id, ReckonOutcome.GONE)
    assert [happening.outcome for happening in stage.told(h.CommitInDoubt)] == ["committed"]
    assert len(stage.told(h.MessageSucceeded)) == 1


@pytest.mark.parametrize(("outcome", "committed"), [("gone", False), ("moved", True)])
def test_the_server_knows_better_than_the_look_of_the_row(outcome: str, committed: bool) -> None:
    """While it has not restarted: our own commit, or somebody else's."""
    stage, grant = in_doubt()
    stage.reckon(grant.claim_id, ReckonOutcome(outcome), committed=committed)
    assert bool(stage.told(h.MessageSucceeded)) is committed
    assert stage.look().owed == 0


@pytest.mark.parametrize("dies", [False, True])
def test_a_row_that_is_free_names_a_rollback(dies: bool) -> None:
    """It is charged now."""
    stage, grant = in_doubt(dies=dies)
    stage.reckon(grant.claim_id, ReckonOutcome.DONE)
    assert [happening.outcome for happening in stage.told(h.CommitInDoubt)] == ["rolled_back"]
    assert not stage.told(h.MessageSucceeded)
    assert len(stage.told(h.MessageRetried)) == 1


def test_a_retry_that_moved_its_row_on_was_committed() -> None:
    """Not charged a second time."""
    stage, grant = in_doubt(Outcome(OutcomeKind.RETRY, delay_ms=50))
    stage.reckon(grant.claim_id, ReckonOutcome.MOVED)
    assert stage.told(h.MessageRetried)[0].delay_ms == 50
    assert stage.look().owed == 0


def test_a_commit_that_hangs_is_ended() -> None:
    """The verdict has a deadline of its own; the row decides, nobody is charged if it was rolled back."""
    stage, grant = working()
    stage.ask_commit(grant)
    assert not stage.wait(64.9).all(c.KillChild)
    assert stage.wait(0.1).only(c.KillChild).child == grant.child
    stage.die(grant.child, signal="SIGKILL")
    assert stage.only(c.Reckon).reckoning.settlement == Retry(200, entry(refunds=1))


@pytest.mark.parametrize("statement_timeout_s", [1.0, 30.0, 600.0])
def test_a_child_is_not_killed_while_the_server_may_be_at_its_statements(statement_timeout_s: float) -> None:
    """Two statements as long as they may last, and a session to open before a claim: killed after that, not before."""
    for asked, slack_s in ((False, 10.0), (True, 5.0)):
        stage = Stage(transactional(), statement_timeout_s=statement_timeout_s).start()
        grant = stage.only(c.GrantPermit)
        if asked:
            stage.tx_claim(grant, 1)
            stage.ask_commit(grant)
        assert not stage.wait(2 * statement_timeout_s + slack_s - 0.1).all(c.KillChild)
        assert stage.wait(0.2).only(c.KillChild).child == grant.child


def test_a_message_that_is_claimed_and_not_begun_has_the_time_of_its_permit() -> None:
    """Its body may be large; counted from the permit."""
    stage = Stage(transactional(), statement_timeout_s=4.0).start()
    grant = stage.only(c.GrantPermit)
    stage.wait(10.0)
    stage.tell(e.TransactionClaimed(grant.child, grant.claim_id, 1, 1, 5, 5, None, TX))
    assert not stage.wait(7.9).all(c.KillChild)
    assert stage.wait(0.2).only(c.KillChild).child == grant.child


def test_a_commit_in_doubt_after_the_grace_period_is_still_reckoned() -> None:
    """It may have been committed."""
    stage, grant = working()
    stage.tell(e.ShutdownRequested())
    stage.ask_commit(grant)
    stage.tell(e.EscalationRequested())
    stage.tx_end(grant, "08006", in_doubt=True)
    assert stage.only(c.Reckon).reckoning.settlement == Retry(200, entry(refunds=1))


# --- charges that are owed --------------------------------------------------------------------------------------------


def test_a_charge_whose_row_moved_on_is_owed_until_the_message_is_seen_again() -> None:
    """Another supervisor's attempt was quicker: half of the charges were lost without this."""
    stage, grant = working()
    stage.die(grant.child)
    stage.ready()
    stage.reckon(grant.claim_id, ReckonOutcome.MOVED)
    assert stage.told(h.ChargeOwed)[0].msg_id == 1
    grant = stage.only(c.GrantPermit)
    assert grant.owed == ((1, 1, 1),)
    stage.tx_claim(grant, 1, read_ct=2)
    assert stage.told(h.MessageStartedRunning)[0].attempt == 3
    stage.ask_commit(grant, FAILURE)
    answer = stage.only(c.AnswerCommit)
    assert (answer.settlement, answer.read_ct) == (Retry(4_000, entry(deaths=1)), 3)
    stage.tell(e.Committed(grant.child, grant.claim_id))
    assert stage.only(c.GrantPermit).owed == ()


def test_an_owed_charge_is_carried_over_when_its_carrier_fails_too() -> None:
    """Both are written by one statement."""
    stage, grant = working()
    stage.die(grant.child)
    stage.ready()
    stage.reckon(grant.claim_id, ReckonOutcome.MOVED)
    grant = stage.only(c.GrantPermit)
    stage.tx_claim(grant, 1, read_ct=2)
    stage.die(grant.child)
    assert stage.only(c.Reckon).reckoning == Reckoning(1, 1, Retry(4_000, entry(deaths=2)), extra=1)


def test_a_row_that_is_taken_is_asked_again_and_after_a_while_out_of_the_way() -> None:
    """The killed child's session may hold it for a moment; somebody else's for longer."""
    stage, grant = working()
    stage.die(grant.child)
    stage.ready()
    stage.reckon(grant.claim_id, ReckonOutcome.BUSY)
    assert not stage.all(c.GrantPermit)
    waited = 0.0
    while not stage.all(c.GrantPermit):
        stage.wait(0.05)
        waited += 0.05
        if stage.all(c.Reckon):
            stage.reckon(grant.claim_id, ReckonOutcome.BUSY)
    assert 1.9 < waited < 2.3
    assert stage.told(h.ChargeOwed)
    assert not stage.wait(0.4).all(c.Reckon)
    assert stage.wait(0.1).all(c.Reckon)


def test_a_child_is_told_of_a_charge_that_it_would_take_over() -> None:
    """Two supervisors that snatch a poison message from each other: each counts its own charges, and it ends."""
    stage, grant = working()
    stage.die(grant.child)
    stage.ready()
    stage.reckon(grant.claim_id, ReckonOutcome.TAKEN)
    assert stage.only(c.GrantPermit).owed == ((1, 1, 1),)


def test_an_attempt_of_ours_that_holds_the_row_takes_the_charge_over() -> None:
    """It had claimed the message before the earlier attempt could be charged; and the charge is made once."""
    stage = Stage(transactional(concurrency=2)).start()
    first = stage.only(c.GrantPermit)
    stage.tx_claim(first, 1)
    second = stage.only(c.GrantPermit)
    stage.die(first.child)
    stage.tx_claim(second, 1)  # the rollback had freed it
    stage.reckon(first.claim_id, ReckonOutcome.BUSY)
    assert stage.look().owed == 0
    stage.ask_commit(second, FAILURE)
    answer = stage.only(c.AnswerCommit)
    assert (answer.settlement, answer.read_ct) == (Retry(2_000, entry(deaths=1)), 2)


def test_a_charge_whose_answer_was_lost_is_not_made_twice() -> None:
    """The row moved on: by our own charge, as far as anybody can tell."""
    stage, grant = working()
    stage.die(grant.child)
    stage.reckon(grant.claim_id, ReckonOutcome.FAILED)
    stage.wait(0.1)
    stage.reckon(grant.claim_id, ReckonOutcome.MOVED)
    assert not stage.told(h.ChargeOwed)
    assert len(stage.told(h.SettlementLapsed)) == 1


def test_owed_charges_are_bounded() -> None:
    """The oldest are forgotten."""
    stage = Stage(transactional(concurrency=1)).start()
    machine: Any = stage.core._queues[Q]
    reckonings = machine.reckonings
    for msg_id in range(1, 10_003):
        reckonings._owed[msg_id] = reckonings._charge_of(_debtor(machine, msg_id))
    reckonings._owe(_debtor(machine, 10_003), counted=False)
    assert len(reckonings) == 10_000
    assert min(reckonings._owed) == 4


def _debtor(machine: Any, msg_id: int) -> Delivery:
    delivery = Delivery(machine.ctx.next_claim(), DeliveryState.RECKONING, 0.0, Fence(msg_id, 1, 0))
    delivery.verdict = machine.judge.uncommitted(delivery, None, None)
    return delivery


def test_answers_that_nobody_waits_for_say_nothing() -> None:
    """Late, repeated, or for another message."""
    stage, grant = working()
    child, other = grant.child, grant.claim_id + 1
    for event in (
        e.PermitEmpty(child, grant.claim_id, None),
        e.TransactionClaimed(child, grant.claim_id, 1, 1, 5, 5, None, TX),
        e.Committed(child, grant.claim_id),
        e.CommitRequested(child, other, SUCCESS),  # type: ignore[arg-type]
        e.TransactionEnded(child, other, None, None, False, claimed=True),  # type: ignore[arg-type]
        e.Reckoned(Q, grant.claim_id, ReckonOutcome.DONE),
        e.MessageStarted(child, grant.claim_id),
    ):
        assert not stage.tell(event).last
    assert stage.states() == ["busy"]

"""A claim of what somebody had before and gave up: it waits until the earlier attempt is charged.

`touched` says so in the claim. The child asks, and the core answers: go, back, or back and nobody for a moment.
"""

from __future__ import annotations

import pytest

from shared.pgmq.records import DeadLetter, ReckonOutcome, Retry
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.types import ErrorInfo
from tests.unit.core.stage import FAILURE, TX, Stage, transactional

POSTPONED_MS = 1_000


def claim(stage: Stage, grant: c.GrantPermit, msg_id: int = 1, read_ct: int = 1, stored: str | None = None) -> Stage:
    """A child claimed a message that came back by a rollback, and waits for an answer."""
    event = e.TransactionClaimed(grant.child, grant.claim_id, msg_id, read_ct, 5, 5, stored, TX, touched=True)
    return stage.tell(event)


def waiting() -> tuple[Stage, c.GrantPermit, c.GrantPermit]:
    """The first child runs message 1; the second one claims it too, as the first one's session has ended."""
    stage = Stage(transactional(concurrency=2)).start()
    first = stage.only(c.GrantPermit)
    stage.tx_claim(first, 1)
    second = stage.only(c.GrantPermit)
    claim(stage, second)
    assert not stage.all(c.AnswerClaim)
    return stage, first, second


def answer(stage: Stage) -> tuple[bool, int | None]:
    """The one answer of the last step: whether it may go on, and else how long nobody shall have the message."""
    only = stage.only(c.AnswerClaim)
    return only.go, only.postpone_ms


# --- a message that is not touched ------------------------------------------------------------------------------------


def test_what_nobody_gave_up_is_not_asked_for() -> None:
    """The child begins by itself."""
    stage = Stage(transactional()).start()
    stage.tx_claim(stage.only(c.GrantPermit), 1)
    assert not stage.all(c.AnswerClaim)
    assert not stage.wait(60.0).all(c.AnswerClaim)


# --- another supervisor's, or nobody's --------------------------------------------------------------------------------


def test_what_is_not_ours_is_left_alone_for_a_moment() -> None:
    """Whoever had it has a second to charge it; nothing is reckoned or counted here, and the child is free again."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    assert answer(claim(stage, grant)) == (False, POSTPONED_MS)
    stage.tx_end(grant)
    assert len(stage.told(h.MessageReleased)) == 1
    assert not stage.all(c.Reckon)
    assert not stage.told(h.MessageRetried)
    assert stage.states() in (["idle"], ["busy"])


def test_what_was_left_alone_is_fetched_when_its_moment_is_over() -> None:
    """Nothing notifies of it."""
    stage = Stage(transactional(polling_interval_s=60.0)).start()
    grant = stage.only(c.GrantPermit)
    claim(stage, grant)
    stage.tx_end(grant)
    grant = stage.only(c.GrantPermit)
    stage.tell(e.PermitEmpty(grant.child, grant.claim_id, None))
    assert not stage.wait(0.99).all(c.GrantPermit)
    stage.wait(0.02)
    stage.tx_claim(stage.only(c.GrantPermit), 1)  # a committed change stands there now: it is not touched
    assert len(stage.told(h.MessageStartedRunning)) == 1


def test_other_messages_do_not_wait_for_it() -> None:
    """The next permit goes out with the answer's end."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    claim(stage, grant)
    assert stage.tx_end(grant).all(c.GrantPermit)


# --- our own attempt that has not ended -------------------------------------------------------------------------------


def test_it_waits_for_the_death_of_ours_and_is_refused() -> None:
    """The end of a session is seen sooner than that of its process: only then the charge is known."""
    stage, first, second = waiting()
    stage.die(first.child)
    assert answer(stage) == (False, None)
    assert stage.all(c.Reckon)
    assert not stage.tx_end(second).all(c.GrantPermit)  # the reckoning comes first
    stage.reckon(first.claim_id, ReckonOutcome.DONE)
    assert stage.told(h.MessageRetried)[0].reason == "signal"
    assert stage.all(c.GrantPermit)


def test_it_waits_for_an_attempt_of_ours_that_lost_its_session() -> None:
    """Its handler says so at its next statement."""
    stage, first, _ = waiting()
    stage.wait(0.1)
    stage.tx_end(first, "57P01")
    assert answer(stage) == (False, None)
    assert stage.all(c.Reckon)


def test_of_an_attempt_of_ours_that_goes_on_nothing_is_waited_for_long() -> None:
    """Its session is over and its handler does not notice: the message would wait as long as that runs."""
    stage, _, second = waiting()
    assert not stage.wait(0.19).all(c.AnswerClaim)
    assert answer(stage.wait(0.02)) == (True, None)
    stage.tell(e.MessageStarted(second.child, second.claim_id))
    assert len(stage.told(h.MessageStartedRunning)) == 1


def test_of_an_attempt_that_ends_with_nothing_to_charge_nobody_knows_more() -> None:
    """Two children had it in turn while a third one's charge is made: as with a stranger's, a moment passes."""
    stage = Stage(transactional(concurrency=2)).start()
    first = stage.only(c.GrantPermit)
    claim(stage, first)
    stage.tx_end(first)
    second = stage.all(c.GrantPermit)[0]
    assert answer(claim(stage, second)) == (False, POSTPONED_MS)


# --- our own attempt that is being reckoned ---------------------------------------------------------------------------


def reckoning() -> tuple[Stage, c.GrantPermit, c.GrantPermit]:
    """A permit is on its way when a child dies; then its message is claimed by that permit."""
    stage = Stage(transactional(concurrency=2)).start()
    first = stage.only(c.GrantPermit)
    stage.tx_claim(first, 1)
    second = stage.only(c.GrantPermit)
    stage.die(first.child)
    assert answer(claim(stage, second)) == (False, None)
    return stage, first, second


def test_the_answer_of_the_reckoning_comes_first() -> None:
    """Charged before the second child has even rolled back: no second charge, and its backoff holds."""
    stage, first, second = reckoning()
    stage.reckon(first.claim_id, ReckonOutcome.DONE)
    assert stage.told(h.MessageRetried)[0].delay_ms == 1_000
    stage.tx_end(second)
    assert not stage.all(c.Reckon)
    assert stage.look().owed == 0


@pytest.mark.parametrize("outcome", [ReckonOutcome.BUSY, ReckonOutcome.TAKEN])
def test_the_answer_of_the_reckoning_comes_last(outcome: ReckonOutcome) -> None:
    """It met the row in the second child's hands, who gives it back: the question is put again at once."""
    stage, first, second = reckoning()
    stage.reckon(first.claim_id, outcome)
    assert not stage.all(c.Reckon)
    stage.tx_end(second)
    assert stage.only(c.Reckon).reckoning.settlement == Retry(1_000, '{"queue":"q","msg_id":1,"refunds":0,"deaths":1}')
    stage.reckon(first.claim_id, ReckonOutcome.DONE)
    assert stage.look().owed == 0


def test_a_refused_claim_takes_no_charge_over() -> None:
    """It rolls back: a charge that it carried would be lost with it."""
    stage, first, second = reckoning()
    stage.reckon(first.claim_id, ReckonOutcome.BUSY)
    assert stage.look().owed == 1
    stage.tx_end(second)
    assert stage.look().owed == 1


def test_what_another_supervisor_holds_is_asked_for_often_at_first() -> None:
    """It leaves our message alone for a second: within that time the charge must find it free."""
    stage = Stage(transactional()).start()
    first = stage.only(c.GrantPermit)
    stage.tx_claim(first, 1)
    stage.die(first.child)
    asked = 0
    for _ in range(20):
        stage.reckon(first.claim_id, ReckonOutcome.TAKEN)
        asked += len(stage.wait(0.05).all(c.Reckon))
    assert asked == 20
    stage.wait(0.05)
    stage.reckon(first.claim_id, ReckonOutcome.TAKEN)
    assert not stage.wait(0.4).all(c.Reckon)
    assert stage.wait(0.1).all(c.Reckon)


# --- other ends of the waiting ----------------------------------------------------------------------------------------


def test_a_child_that_dies_while_it_waits_has_not_begun() -> None:
    """Written down as a refund; the attempt that it waited for is charged as ever."""
    stage, first, second = waiting()
    stage.die(second.child)
    refund = stage.only(c.Reckon)
    assert refund.claim_id == second.claim_id
    assert isinstance(refund.reckoning.settlement, Retry)
    assert '"deaths":0' in (refund.reckoning.settlement.accounts or "")
    assert not stage.wait(1.0).all(c.AnswerClaim)
    stage.die(first.child)
    [charge] = [command for command in stage.all(c.Reckon) if command.claim_id == first.claim_id]
    assert isinstance(charge.reckoning.settlement, Retry | DeadLetter)


def test_a_child_that_dies_after_its_refusal_is_nobodys_charge() -> None:
    """It was told to give the message back, and so it did."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    assert answer(claim(stage, grant)) == (False, POSTPONED_MS)
    stage.die(grant.child)
    assert not stage.all(c.Reckon)
    assert len(stage.told(h.MessageReleased)) == 1


def test_a_stop_ends_the_waiting() -> None:
    """No new work begins while draining."""
    stage, _, _ = waiting()
    stage.tell(e.ShutdownRequested())
    assert answer(stage) == (False, None)


def test_a_claim_while_draining_is_refused() -> None:
    """The permit was on its way."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    stage.tell(e.ShutdownRequested())
    assert answer(claim(stage, grant)) == (False, None)


def test_a_child_whose_answer_never_came_is_free_again() -> None:
    """It gave up by itself; that costs the message nothing."""
    stage, _, second = waiting()
    error = ErrorInfo("VerdictMissing", "no verdict", "")
    stage.tell(e.TransactionEnded(second.child, second.claim_id, error, None, False, claimed=True))
    assert '"refunds":1' in str(stage.only(c.Reckon).reckoning.settlement)
    assert not stage.wait(1.0).all(c.AnswerClaim)


def test_what_goes_on_carries_the_charge_that_is_owed() -> None:
    """Its row had moved on when it was to be charged; the attempt that goes on writes it with its own verdict."""
    stage = Stage(transactional()).start()
    first = stage.only(c.GrantPermit)
    stage.tx_claim(first, 1)
    stage.die(first.child)
    stage.ready()
    stage.reckon(first.claim_id, ReckonOutcome.MOVED)
    grant = stage.only(c.GrantPermit)
    assert answer(claim(stage, grant, 1, 2)) == (False, POSTPONED_MS)
    stage.tx_end(grant)
    grant = stage.only(c.GrantPermit)
    assert grant.owed == ((1, 1, 1),)
    stage.tx_claim(grant, 1, 2)
    stage.ask_commit(grant, FAILURE)
    assert stage.only(c.AnswerCommit).read_ct == 3

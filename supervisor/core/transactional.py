"""Transactional mode: the child owns the transaction, the parent owns the decisions to claim and to commit.

PERMITTED ──▶ CLAIMED ──▶ RUNNING ──▶ DECIDED ──▶ ENDED            committed
                 │           │           │
                 └───────────┴───────────┴──▶ RECKONING ──▶ ENDED   no commit that we know of: see `reckoning`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shared.pgmq.records import Fence, ReckonOutcome, Release, Retry
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.accounts import parse_accounts
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.queue import QueueMachine
from supervisor.core.reckoning import Reckonings
from supervisor.core.settings import QueueSettings
from supervisor.core.settling import tell_settled
from supervisor.core.snapshot import QueueSnapshot
from supervisor.core.states import ChildState, DeliveryState
from supervisor.core.types import CHARGED_CAUSES, ClaimId, DeathCause, DeathFacts, Outcome, OutcomeKind, StopReason

_HOLD_S: Final = 0.2  # the end of a process is heard of later than its session's
_POSTPONED_MS: Final = 1_000  # the time that another supervisor has to charge what its dead child gave back
_UNSTARTED_DELAY_MS: Final = 200
_UNSEEN_DELAY_S: Final = 0.25  # what a child had claimed and not told of is free when its session has ended
_SPARED_PART: Final = 0.5  # of kill_after, for a commit that is on its way
_NO_FACTS: Final = DeathFacts(None, None, 0, 0.0, "", "")  # of a process that has not ended
_UNDONE: Final = frozenset({"retry", "dead_letter"})  # verdicts that keep none of the handler's work


class TransactionalQueue(QueueMachine):
    def __init__(self, ctx: Context, settings: QueueSettings) -> None:
        super().__init__(ctx, settings)
        self.attempts: dict[ClaimId, Delivery] = {}  # in a child's hands
        self.reckonings = Reckonings(ctx, self.name, self.judge, settled=self._settled, in_hand=self._working)
        self._ramp = 1
        self._permits = 0  # outstanding, not yet claimed
        self._commit_deadline_s = ctx.settings.commit_deadline_s

    # --- permits ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        if not self.wakeups.hungry or not self.may_read or now < self.claim_not_before:
            return
        if self.reckonings.urgent:
            return  # what just rolled back is free, and must be charged before anyone may claim it again
        while self.pool.free and self._permits < self._ramp and self.wakeups.hungry:
            self._grant(now)

    def _grant(self, now: float) -> None:
        child = self.pool.take()
        delivery = Delivery(self.ctx.next_claim(), DeliveryState.PERMITTED, now)
        delivery.dispatched_at = now
        child.delivery = delivery
        self.attempts[delivery.id] = delivery
        self._permits += 1
        self.claims_attempted_at = now
        owed = self.reckonings.owed()
        self.ctx.do(c.GrantPermit(child.id, delivery.id, self.settings.hard_timeout_s, owed))
        self.sooner(self.limits.at_dispatch(delivery))

    def permit_empty(self, child: Child, event: e.PermitEmpty, now: float) -> None:
        delivery = self._attempt(child, event.claim_id)
        if delivery is None or delivery.state is not DeliveryState.PERMITTED:
            return
        self._permits -= 1
        self._ramp = 1
        self.read_succeeded()
        self.wakeups.found_nothing(now, event.next_visible_s)
        self.sooner(self.wakeups.next_deadline())
        self._let_go(child, delivery, now, finished=False)
        self.advance(now)

    def claimed(self, child: Child, event: e.TransactionClaimed, now: float) -> None:
        delivery = self._attempt(child, event.claim_id)
        if delivery is None or delivery.state is not DeliveryState.PERMITTED:
            return
        self._permits -= 1
        self._ramp = min(self._ramp * 2, self.settings.concurrency)
        self.read_succeeded()
        self.wakeups.found()
        delivery.move(DeliveryState.CLAIMED)
        delivery.claimed_at = now
        delivery.fence = Fence(event.msg_id, event.read_ct, event.read_at_us)
        delivery.tx = event.tx
        delivery.enqueued_us, delivery.visible_us = event.enqueued_us, event.visible_us
        accounts = parse_accounts(event.accounts, self.name, event.msg_id, event.read_ct)
        delivery.stored = accounts
        delivery.accounts = accounts
        delivery.attempt = accounts.attempt(event.read_ct)
        self.ctx.tell(h.MessagesClaimed(self.name, 1))
        self.pool.about_to_wear_out(child, now)
        if self.ctx.draining:
            self.limits.stop(child, delivery, StopReason.SHUTDOWN, now)
        if event.touched:
            delivery.held_until = now + _HOLD_S
            self._look_at_held(now)
        else:
            self.reckonings.take_over(delivery)
        self.advance(now)

    def _look_at_held(self, now: float) -> None:
        """What somebody had before and gave up came back from a session that has ended, of ours or of others.

        That attempt is charged before the message runs again; else one that kills its child would kill several before
        the first death counts. Where it was not ours, or died before we knew what it had, whoever has to charge it
        gets a second, once: the pause is committed, and what nobody touched since runs. Of an attempt of ours that goes
        on although its session is over nothing is waited for.
        """
        for child in self.pool.children.values():
            delivery = child.delivery
            if delivery is None or delivery.held_until is None or child.state is not ChildState.BUSY:
                continue
            if self.ctx.draining or self.reckonings.has(delivery.msg_id):
                self._refuse(child, delivery, None)
            elif not self._has_rival(delivery):
                self._refuse(child, delivery, _POSTPONED_MS)
            elif now >= delivery.held_until:
                delivery.held_until = None
                self.reckonings.take_over(delivery)
                self.ctx.do(c.AnswerClaim(child.id, delivery.id, go=True))
            else:
                self.sooner(delivery.held_until)

    def _refuse(self, child: Child, delivery: Delivery, postpone_ms: int | None) -> None:
        delivery.held_until = None
        delivery.verdict = Verdict(None, "release", "not_started", postpone_ms or 0)
        self.ctx.do(c.AnswerClaim(child.id, delivery.id, go=False, postpone_ms=postpone_ms))

    def _has_rival(self, delivery: Delivery) -> bool:
        others = (other for other in self.attempts.values() if other is not delivery)
        return any(other.msg_id == delivery.msg_id for other in others)

    def started(self, child: Child, claim_id: ClaimId, now: float) -> None:
        delivery = self._attempt(child, claim_id)
        if delivery is None or delivery.state is not DeliveryState.CLAIMED:
            return
        delivery.move(DeliveryState.RUNNING)
        delivery.started_at = now
        waited_us = delivery.fence.read_at_us - delivery.visible_us if delivery.visible_us else 0
        wait_s = max(0, waited_us) / 1e6 + (now - delivery.claimed_at)
        msg_id, attempt = delivery.msg_id, delivery.attempt
        self.ctx.tell(h.MessageStartedRunning(self.name, msg_id, attempt, child.id, child.pid, wait_s))
        self.sooner(self.limits.at_start(delivery))

    # --- the end of an attempt --------------------------------------------------------------------------------------

    def commit_requested(self, child: Child, claim_id: ClaimId, outcome: Outcome, now: float) -> None:
        delivery = self._attempt(child, claim_id)
        if delivery is None or delivery.state not in (DeliveryState.RUNNING, DeliveryState.CLAIMED):
            return
        # From CLAIMED: its handler was not called, as it had been stopped, was used up, or cannot be read.
        delivery.finished_at = now
        delivery.decided_at = now
        verdict = self._verdict(delivery, outcome)
        delivery.move(DeliveryState.DECIDED)
        delivery.verdict = verdict
        if child.state is not ChildState.BUSY:
            return  # it is being killed: the row decides
        refused = verdict.settlement is None or isinstance(verdict.settlement, Release)
        if not refused:
            delivery.granted = verdict
        self.ctx.do(
            c.AnswerCommit(
                child.id,
                claim_id,
                None if refused else verdict.settlement,
                keep_work=verdict.kind == "success",
                read_ct=delivery.fence.read_ct + delivery.extra if delivery.extra else None,
            )
        )
        self.sooner(now + self._commit_deadline_s)

    def _verdict(self, delivery: Delivery, outcome: Outcome) -> Verdict:
        if self.ctx.acks_off:
            return self.judge.refund(delivery, "shutdown")
        unrun = delivery.started_at is None and outcome.kind is OutcomeKind.ERROR
        if unrun and delivery.accounts.deaths >= self.settings.max_deaths:
            return self.judge.spent(delivery, outcome.error)
        verdict = self.judge.of_outcome(delivery, outcome)
        if verdict.kind == "abandon":
            return replace(self.judge.abandoned(delivery), settlement=None, kind="abandon")
        return verdict

    def committed(self, child: Child, claim_id: ClaimId, now: float) -> None:
        delivery = self._attempt(child, claim_id)
        if delivery is None or delivery.state is not DeliveryState.DECIDED or delivery.granted is None:
            return
        self._let_go(child, delivery, now, finished=True)
        self._settled(delivery, delivery.granted, now)
        self.advance(now)

    def transaction_ended(self, child: Child, event: e.TransactionEnded, now: float) -> None:
        """No commit that the child knows of; the child lives and is free again."""
        delivery = self._attempt(child, event.claim_id)
        if delivery is None:
            return
        if not event.claimed or delivery.state is DeliveryState.PERMITTED:
            self._not_claimed(child, delivery, event, now)
            return
        delivery.finished_at = delivery.finished_at or now
        if event.in_doubt and delivery.granted is not None:
            self._doubt(delivery)
        charge = self._verdict_of_end(delivery, event)
        if charge is not None and charge.reason == "abandoned":
            self.ctx.tell(h.MessageAbandoned(self.name, delivery.msg_id, delivery.attempt))
        if charge is None and not delivery.in_doubt:
            # Rolled back is given back, and nothing was charged.
            decided = delivery.verdict
            self._let_go(child, delivery, now, finished=delivery.started_at is not None)
            reason = decided.reason if decided is not None else ""
            self.ctx.tell(h.MessageReleased(self.name, delivery.msg_id, reason or "shutdown"))
            self.reckonings.hurry(delivery.msg_id)
            self._come_back(now, 0 if decided is None else decided.delay_ms)
            self.next_at = now
            return
        self._reckon(delivery, charge, now)
        self._let_go(child, delivery, now, finished=True, ended=False)

    def _not_claimed(self, child: Child, delivery: Delivery, event: e.TransactionEnded, now: float) -> None:
        if delivery.state is DeliveryState.PERMITTED:
            self._permits -= 1
        self._ramp = 1  # one child looks whether the database is back
        why = event.error.message if event.error is not None else "the claim failed"
        self._let_go(child, delivery, now, finished=False)
        self.read_failed(why, now)
        self.sooner(self.claim_not_before)

    def _doubt(self, delivery: Delivery) -> None:
        delivery.in_doubt = True
        self.ctx.tell(h.CommitInDoubt(self.name, delivery.msg_id, "unknown"))

    def _verdict_of_end(self, delivery: Delivery, event: e.TransactionEnded) -> Verdict | None:
        """None: nothing to charge; the rollback gave it back."""
        decided = delivery.verdict
        if self.ctx.acks_off or (decided is not None and decided.kind == "release"):
            return None
        if decided is not None and decided.kind == "abandon":
            return self.judge.abandoned(delivery)
        if decided is not None and decided.kind in _UNDONE:
            return decided  # its own transaction could not do it
        if event.outcome is not None and event.outcome.kind is not OutcomeKind.SUCCESS:
            verdict = self.judge.of_outcome(delivery, event.outcome)
            if verdict.kind == "abandon":
                return self.judge.abandoned(delivery)
            return None if verdict.kind == "release" else verdict
        if delivery.state is DeliveryState.CLAIMED and delivery.stop_reason is not StopReason.CANCELLED:
            return self._not_started(delivery, "not_started") or self.judge.uncommitted(
                delivery, event.error, event.sqlstate
            )
        if event.error is not None and event.error.type == "VerdictMissing":
            return self._uncharged(delivery, "verdict_missing")
        return self.judge.uncommitted(delivery, event.error, event.sqlstate)

    def died(self, child: Child, facts: DeathFacts, now: float) -> None:
        delivery = child.delivery
        cause = self.pool.ended(child, now, facts)
        self.next_at = now
        if delivery is None:
            self.tell_ended(child, cause, facts, None, None)
            return
        child.delivery = None
        self.attempts.pop(delivery.id, None)
        if delivery.state is DeliveryState.PERMITTED:
            # It may have claimed and not said so: then the server rolls that back, and nothing is known to charge.
            self._permits -= 1
            self.tell_ended(child, cause, facts, None, None)
            delivery.move(DeliveryState.ENDED)
            self._come_back(now)
            return
        delivery.finished_at = delivery.finished_at or now
        if delivery.tx is not None:
            self.ctx.do(c.TerminateBackend(self.name, delivery.tx))
        verdict = self._verdict_of_death(delivery, cause, facts)
        self.tell_ended(child, cause, facts, delivery, verdict)
        if delivery.granted is not None:
            self._doubt(delivery)
        if verdict is None and not delivery.in_doubt:
            delivery.move(DeliveryState.ENDED)
            self.ctx.tell(h.MessageReleased(self.name, delivery.msg_id, str(cause)))
            self._come_back(now)
            return
        self._reckon(delivery, verdict, now)

    def _verdict_of_death(self, delivery: Delivery, cause: DeathCause, facts: DeathFacts) -> Verdict | None:
        """None: nothing to charge; the rollback gave it back."""
        decided = delivery.verdict
        if self.ctx.acks_off or cause is DeathCause.SHUTDOWN or (decided is not None and decided.kind == "release"):
            return None
        if decided is not None and decided.kind in _UNDONE:
            return decided  # it had said how it ended, and a whole result counts
        if decided is not None and decided.kind == "abandon":
            return self.judge.abandoned(delivery)
        if delivery.state is DeliveryState.CLAIMED and cause in CHARGED_CAUSES:
            return self._not_started(delivery, str(cause)) or self.judge.of_death(delivery, cause, facts)
        if cause in CHARGED_CAUSES or cause is DeathCause.CANCELLED:
            return self.judge.of_death(delivery, cause, facts)
        return self._uncharged(delivery, str(cause))

    def _not_started(self, delivery: Delivery, reason: str) -> Verdict | None:
        """Not its fault, but written down: what is only rolled back comes back for ever. None: too often."""
        early = delivery.accounts.early + 1
        if early > self.settings.max_deaths:
            return None
        delivery.accounts = replace(delivery.accounts, early=early)
        return self._uncharged(delivery, reason)

    def _uncharged(self, delivery: Delivery, reason: str) -> Verdict:
        refund = self.judge.refund(delivery, reason, _UNSTARTED_DELAY_MS)
        accounts = refund.accounts.to_json(self.name, delivery.msg_id) if refund.accounts is not None else None
        return replace(refund, settlement=Retry(_UNSTARTED_DELAY_MS, accounts))

    # --- reckoning --------------------------------------------------------------------------------------------------

    def _reckon(self, delivery: Delivery, charge: Verdict | None, now: float) -> None:
        """With nothing to charge there is still a commit in doubt; a refund is what a rollback leads to."""
        self.attempts.pop(delivery.id, None)
        self.reckonings.begin(delivery, self._written_down(delivery, charge or self._uncharged(delivery, "shutdown")))
        self.next_at = now

    def _written_down(self, delivery: Delivery, charge: Verdict) -> Verdict:
        """Its own transaction may leave the accounts alone; here they say who was charged last."""
        settlement = charge.settlement
        if not isinstance(settlement, Retry) or settlement.accounts is not None:
            return charge
        accounts = charge.accounts or delivery.accounts
        return replace(charge, settlement=replace(settlement, accounts=accounts.to_json(self.name, delivery.msg_id)))

    def reckoned(
        self, claim_id: ClaimId, outcome: ReckonOutcome, now: float, *, committed: bool | None, error: str | None = None
    ) -> None:
        self.next_at = now
        self.reckonings.answered(claim_id, outcome, now, committed=committed, error=error)
        if outcome is not ReckonOutcome.FAILED:
            self.heard_of_database(None, now)
        elif self.reckonings.urgent:
            # Claims wait for this answer, so nothing else would find out, and tell, that the database is away.
            self.claims_attempted_at = now
            self.read_failed(error or "no answer to a reckoning", now)
        self.advance(now)

    # --- small things -----------------------------------------------------------------------------------------------

    def _attempt(self, child: Child, claim_id: ClaimId) -> Delivery | None:
        delivery = child.delivery
        return delivery if delivery is not None and delivery.id == claim_id else None

    def _let_go(self, child: Child, delivery: Delivery, now: float, *, finished: bool, ended: bool = True) -> None:
        self.attempts.pop(delivery.id, None)
        if ended:
            delivery.move(DeliveryState.ENDED)
        self.pool.vacate(child, now, finished=finished)

    def _settled(self, delivery: Delivery, verdict: Verdict, now: float) -> None:
        if verdict.kind in ("success", "dead_letter"):
            self.reckonings.forget(delivery.msg_id)
        if verdict.kind in ("retry", "release"):
            self.wakeups.expect(now + verdict.delay_ms / 1000)
            self.sooner(self.wakeups.next_deadline())
        if verdict.reason != "abandoned":  # told when it was refused
            tell_settled(self.ctx, self.name, delivery, verdict, now)

    def _come_back(self, now: float, delay_ms: int = 0) -> None:
        """What was rolled back is visible as soon as its session is over, and nothing else says so."""
        self.wakeups.expect(now + (delay_ms / 1000 or _UNSEEN_DELAY_S))
        self.sooner(self.wakeups.next_deadline())

    def give_back_waiting(self, now: float, reason: str) -> None:
        """Nothing waits here: a claim is made by the child that runs it."""

    def unkillable(self, child: Child, now: float) -> None:
        """Killed and still there. Its session is ended, and what it did is charged, or it would come back for ever."""
        delivery = child.delivery
        if delivery is None:
            return
        child.delivery = None
        self.attempts.pop(delivery.id, None)
        if delivery.state is DeliveryState.PERMITTED:
            self._permits -= 1
            delivery.move(DeliveryState.ENDED)
            return
        if delivery.tx is not None:
            self.ctx.do(c.TerminateBackend(self.name, delivery.tx))
        verdict = self._verdict_of_death(delivery, child.kill_cause or DeathCause.UNRESPONSIVE, _NO_FACTS)
        if delivery.granted is not None:
            self._doubt(delivery)
        if verdict is not None or delivery.in_doubt:
            self._reckon(delivery, verdict, now)
            return
        delivery.move(DeliveryState.ENDED)
        self.ctx.tell(h.SettlementLapsed(self.name, delivery.msg_id, "none", "its child cannot be killed"))

    @property
    def reading(self) -> bool:
        return self._permits > 0

    def spare(self, child: Child, now: float) -> bool:
        delivery = child.delivery
        if delivery is None or delivery.granted is None or delivery.spared_until is not None:
            return False
        delivery.spared_until = now + self.ctx.settings.kill_after_s * _SPARED_PART
        self.sooner(delivery.spared_until)
        return True

    def tick_mode(self, now: float) -> None:
        self.sooner(self.reckonings.tick(now))
        self._look_at_held(now)
        if not self.ctx.acks_off:
            return
        for child in list(self.pool.children.values()):
            until = child.delivery.spared_until if child.delivery is not None else None
            if until is None or child.state is not ChildState.BUSY:
                continue
            if now >= until:
                self.pool.kill(child, now, DeathCause.SHUTDOWN, with_stack=True)
            else:
                self.sooner(until)

    @property
    def open_work(self) -> int:
        return len(self.attempts) + self.reckonings.urgent

    def held(self) -> list[Delivery]:
        return [*self._in_hand(), *self.reckonings]

    def _in_hand(self) -> Iterator[Delivery]:
        return (d for d in self.attempts.values() if d.state is not DeliveryState.PERMITTED)

    def _working(self) -> Iterator[Delivery]:
        """Attempts whose verdict is not fixed by a commit that is on its way."""
        return (d for d in self.attempts.values() if d.state in (DeliveryState.CLAIMED, DeliveryState.RUNNING))

    def snapshot(self, now: float) -> QueueSnapshot:
        deciding = sum(1 for d in self.attempts.values() if d.state is DeliveryState.DECIDED)
        return self._snapshot(now, waiting=0, settling=deciding, owed=len(self.reckonings))

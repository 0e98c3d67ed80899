"""Transactional mode: the child owns the transaction, the parent owns the decisions to claim and to commit.

    PERMITTED ──▶ CLAIMED ──▶ RUNNING ──▶ DECIDED ──▶ ENDED            committed
                     │           │           │
                     └───────────┴───────────┴──▶ RECKONING ──▶ ENDED   no commit that we know of

A rollback undoes the claim and its read_ct, so an attempt without a commit would come back at once, uncharged, for
ever. Each is settled afterwards by one guarded statement; *the row is the proof* of what became of the transaction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, assert_never

from shared.pgmq.records import DeadLetter, Fence, Reckoning, ReckonOutcome, Release, Retry
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.accounts import parse_accounts
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.queue import QueueMachine
from supervisor.core.settings import QueueSettings
from supervisor.core.settling import tell_settled
from supervisor.core.snapshot import QueueSnapshot
from supervisor.core.states import ChildState, DeliveryState
from supervisor.core.types import CHARGED_CAUSES, ClaimId, DeathCause, DeathFacts, Outcome, StopReason

_MAX_OWED: Final = 10_000
_BUSY_WAIT_S: Final = 2.0  # a killed child's session may hold the row so long before its server notices
_BUSY_AGAIN_S: Final = 0.05
_OWED_AGAIN_S: Final = 2.0
_UNSTARTED_DELAY_MS: Final = 200
_NO_FACTS: Final = DeathFacts(None, None, 0, 0.0, "", "")  # of a process that has not ended


@dataclass(frozen=True, slots=True)
class Owed:
    """Charges that found their row moved on. Carried over to the next attempt of ours that claims the message.

    Every charge has one holder: a reckoning that goes on, this, or the attempt that took it over (its `extra`).
    """

    attempts: int
    deaths: int


class TransactionalQueue(QueueMachine):
    def __init__(self, ctx: Context, settings: QueueSettings) -> None:
        super().__init__(ctx, settings)
        self.attempts: dict[ClaimId, Delivery] = {}  # in a child's hands
        self.reckoning: dict[ClaimId, Delivery] = {}
        self.owed: OrderedDict[int, Owed] = OrderedDict()  # by msg_id
        self._ramp = 1
        self._permits = 0  # outstanding, not yet claimed

    # --- permits ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        if not self.wakeups.hungry or not self.may_read or now < self.claim_not_before:
            return
        if any(self._blocks(delivery) for delivery in self.reckoning.values()):
            return  # what just rolled back is free, and must be charged before anyone may claim it again
        while self.pool.free and self._permits < self._ramp and self.wakeups.hungry:
            self._grant(now)

    def _blocks(self, delivery: Delivery) -> bool:
        return not delivery.lingers

    def _grant(self, now: float) -> None:
        child = self.pool.take()
        delivery = Delivery(self.ctx.next_claim(), DeliveryState.PERMITTED, now, dispatched_at=now)
        child.delivery = delivery
        self.attempts[delivery.id] = delivery
        self._permits += 1
        self.claims_attempted_at = now
        owed = tuple((msg_id, charge.attempts) for msg_id, charge in list(self.owed.items())[-100:])
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
        delivery.fence = Fence(event.msg_id, event.read_ct, 0)
        delivery.tx = event.tx
        delivery.enqueued_us, delivery.visible_us = event.enqueued_us, event.visible_us
        accounts = parse_accounts(event.accounts, self.name, event.msg_id, event.read_ct)
        delivery.stored = accounts
        delivery.accounts = accounts
        delivery.attempt = accounts.attempt(event.read_ct)
        owed = self.owed.pop(event.msg_id, None)
        if owed is not None:
            self._take_over(delivery, owed)
        for debtor in list(self.reckoning.values()):
            if debtor.settle_at is not None:  # with its question on the way nobody knows what it charges
                self._absorb(delivery, debtor)
        self.ctx.tell(h.MessagesClaimed(self.name, 1))
        self.pool.about_to_wear_out(child, now)
        if self.ctx.draining:
            self.limits.stop(child, delivery, StopReason.SHUTDOWN, now)
        self.advance(now)

    def started(self, child: Child, claim_id: ClaimId, now: float) -> None:
        delivery = self._attempt(child, claim_id)
        if delivery is None or delivery.state is not DeliveryState.CLAIMED:
            return
        delivery.move(DeliveryState.RUNNING)
        delivery.started_at = now
        self.ctx.tell(h.MessageStartedRunning(self.name, delivery.msg_id, delivery.attempt, child.id, child.pid, None))
        self.sooner(self.limits.at_start(delivery))

    # --- the end of an attempt --------------------------------------------------------------------------------------

    def commit_requested(self, child: Child, claim_id: ClaimId, outcome: Outcome, now: float) -> None:
        delivery = self._attempt(child, claim_id)
        if delivery is None or delivery.state not in (DeliveryState.RUNNING, DeliveryState.CLAIMED):
            return
        if delivery.state is DeliveryState.CLAIMED:
            self.started(child, claim_id, now)
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
        self.sooner(now + self.timing.commit_deadline_s)

    def _verdict(self, delivery: Delivery, outcome: Outcome) -> Verdict:
        if self.ctx.acks_off:
            return self.judge.refund(delivery, "shutdown")
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
        if delivery.state is DeliveryState.PERMITTED:
            self._permits -= 1
        if not event.claimed or delivery.state is DeliveryState.PERMITTED:
            why = event.error.message if event.error is not None else "the claim failed"
            self._let_go(child, delivery, now, finished=False)
            self.read_failed(why, now)
            self.sooner(self.claim_not_before)
            return
        delivery.finished_at = delivery.finished_at or now
        refused = delivery.state is DeliveryState.DECIDED and delivery.granted is None
        verdict = delivery.verdict
        if refused and verdict is not None and verdict.kind == "release":
            # Stopped by shutdown, or after the grace period: rolled back is given back, nothing was charged.
            self._let_go(child, delivery, now, finished=True)
            self.ctx.tell(h.MessageReleased(self.name, delivery.msg_id, verdict.reason))
            return
        if refused and verdict is not None and verdict.kind == "abandon":
            charge = self.judge.abandoned(delivery)
            self.ctx.tell(h.MessageAbandoned(self.name, delivery.msg_id, delivery.attempt))
        elif self.ctx.acks_off:
            charge = None
        else:
            charge = self.judge.uncommitted(delivery, event.error, event.sqlstate)
        if event.in_doubt:
            self.ctx.tell(h.CommitInDoubt(self.name, delivery.msg_id, "unknown"))
        if charge is None and delivery.granted is None:
            self._let_go(child, delivery, now, finished=True)
            self.ctx.tell(h.MessageReleased(self.name, delivery.msg_id, "shutdown"))
            return
        self._reckon(delivery, charge, now)
        self._let_go(child, delivery, now, finished=True, ended=False)

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
            return
        delivery.finished_at = delivery.finished_at or now
        if delivery.tx is not None:
            self.ctx.do(c.TerminateBackend(self.name, delivery.tx))
        verdict = self._verdict_of_death(delivery, cause, facts)
        self.tell_ended(child, cause, facts, delivery, verdict)
        if verdict is None and delivery.granted is None:
            delivery.move(DeliveryState.ENDED)
            self.ctx.tell(h.MessageReleased(self.name, delivery.msg_id, str(cause)))
            return
        if delivery.granted is not None:
            self.ctx.tell(h.CommitInDoubt(self.name, delivery.msg_id, "unknown"))
        self._reckon(delivery, verdict, now)

    def _verdict_of_death(self, delivery: Delivery, cause: DeathCause, facts: DeathFacts) -> Verdict | None:
        """None: nothing to charge; the rollback gave it back."""
        if self.ctx.acks_off or cause is DeathCause.SHUTDOWN:
            return None
        if delivery.started_at is None and cause in CHARGED_CAUSES:
            early = delivery.accounts.early + 1
            if early <= self.settings.max_deaths:
                # Not its fault, but written down: a claim that is only rolled back would come back for ever.
                delivery.accounts = replace(delivery.accounts, early=early)
                return self._uncharged(delivery, str(cause))
        if cause in CHARGED_CAUSES or cause is DeathCause.CANCELLED:
            return self.judge.of_death(delivery, cause, facts)
        return self._uncharged(delivery, str(cause))

    def _uncharged(self, delivery: Delivery, reason: str) -> Verdict:
        refund = self.judge.refund(delivery, reason, _UNSTARTED_DELAY_MS)
        accounts = refund.accounts.to_json(self.name, delivery.msg_id) if refund.accounts is not None else None
        return replace(refund, settlement=Retry(_UNSTARTED_DELAY_MS, accounts))

    # --- reckoning --------------------------------------------------------------------------------------------------

    def _reckon(self, delivery: Delivery, charge: Verdict | None, now: float) -> None:
        delivery.move(DeliveryState.RECKONING)
        # With nothing to charge there is still a commit in doubt; a refund is what a rollback leads to.
        delivery.verdict = charge or self._uncharged(delivery, "shutdown")
        self.attempts.pop(delivery.id, None)
        self.reckoning[delivery.id] = delivery
        self._ask(delivery)
        self.next_at = now

    def _ask(self, delivery: Delivery) -> None:
        delivery.settle_at = None
        settlement = delivery.verdict.settlement if delivery.verdict is not None else None
        if not isinstance(settlement, Retry | DeadLetter):
            raise TypeError(f"a reckoning needs a retry or a dead letter, not {settlement!r}")
        if isinstance(settlement, Retry) and settlement.accounts is None and delivery.verdict is not None:
            # With accounts in it a charge that was repeated after a lost answer knows itself again.
            accounts = delivery.verdict.accounts or delivery.accounts
            settlement = replace(settlement, accounts=accounts.to_json(self.name, delivery.msg_id))
        question = Reckoning(delivery.msg_id, delivery.fence.read_ct - 1, settlement, delivery.extra)
        in_doubt = delivery.tx if delivery.granted is not None else None
        self.ctx.do(c.Reckon(self.name, delivery.id, question, in_doubt))

    def reckoned(self, claim_id: ClaimId, outcome: ReckonOutcome, now: float, *, committed: bool | None) -> None:
        delivery = self.reckoning.get(claim_id)
        if delivery is None or delivery.verdict is None:
            return
        self.next_at = now
        match outcome:
            case ReckonOutcome.DONE:
                if delivery.granted is not None:
                    self.ctx.tell(h.CommitInDoubt(self.name, delivery.msg_id, "rolled_back"))
                self._reckoned(delivery)
                self._settled(delivery, delivery.verdict, now)
            case ReckonOutcome.GONE | ReckonOutcome.MOVED:
                self._reckoned(delivery)
                self._not_there(delivery, outcome, committed, now)
            case ReckonOutcome.BUSY:
                self._taken(delivery, now)
            case ReckonOutcome.FAILED:
                delivery.reckon_tries += 1
                timing = self.timing
                backoff = timing.settle_backoff_base_s * 2.0 ** min(delivery.reckon_tries - 1, 16)
                delivery.settle_at = now + min(timing.settle_backoff_max_s, backoff)
            case _:
                assert_never(outcome)
        self.advance(now)

    def _not_there(self, delivery: Delivery, outcome: ReckonOutcome, committed: bool | None, now: float) -> None:
        """No row with the earlier read_ct: our own commit went through, or somebody else's."""
        granted, gone = delivery.granted, outcome is ReckonOutcome.GONE
        if committed is None:  # the server does not know any more: what the row looks like must do
            committed = granted is not None and isinstance(granted.settlement, Retry) is not gone
        if granted is not None and committed:
            self.ctx.tell(h.CommitInDoubt(self.name, delivery.msg_id, "committed"))
            self._settled(delivery, granted, now)
        elif gone or delivery.reckon_tries:
            # After a lost answer this may be our own charge, and none is made twice.
            why = "its row is gone or has moved on: settled by somebody else, or charged unheard"
            kind = "none" if delivery.verdict is None else delivery.verdict.kind
            self.ctx.tell(h.SettlementLapsed(self.name, delivery.msg_id, kind, why))
        else:
            self._owe(delivery)  # another attempt has committed since

    def _taken(self, delivery: Delivery, now: float) -> None:
        """Somebody holds the row's lock: the session of the child that died, or the next attempt."""
        if delivery.reckoned_busy_since is None:
            delivery.reckoned_busy_since = now
        if not delivery.lingers and now - delivery.reckoned_busy_since >= _BUSY_WAIT_S:
            delivery.lingers = True  # no longer in the way of permits
            self.ctx.tell(h.ChargeOwed(self.name, delivery.msg_id))
        delivery.settle_at = now + (_OWED_AGAIN_S if delivery.lingers else _BUSY_AGAIN_S)
        for attempt in self.attempts.values():
            if attempt.state in (DeliveryState.CLAIMED, DeliveryState.RUNNING) and self._absorb(attempt, delivery):
                return

    def _reckoned(self, delivery: Delivery) -> None:
        del self.reckoning[delivery.id]
        delivery.move(DeliveryState.ENDED)

    def _charge_of(self, delivery: Delivery) -> Owed:
        """What an attempt in reckoning adds to its row, with what it took over."""
        deaths = 0
        if delivery.verdict is not None and delivery.verdict.accounts is not None:
            deaths = max(0, delivery.verdict.accounts.deaths - delivery.stored.deaths)
        uncharged = delivery.verdict is None or delivery.verdict.kind == "release"
        return Owed(delivery.extra + (0 if uncharged else 1), deaths)

    def _absorb(self, attempt: Delivery, debtor: Delivery) -> bool:
        """An attempt of ours claimed the message before an earlier one was charged: it carries that charge too."""
        if attempt.fence != debtor.fence:
            return False
        self._take_over(attempt, self._charge_of(debtor))
        self._reckoned(debtor)
        return True

    def _take_over(self, delivery: Delivery, owed: Owed) -> None:
        delivery.extra += owed.attempts
        delivery.accounts = replace(delivery.accounts, deaths=delivery.accounts.deaths + owed.deaths)
        delivery.attempt = delivery.accounts.attempt(delivery.fence.read_ct + delivery.extra)

    def _owe(self, delivery: Delivery) -> None:
        charge = self._charge_of(delivery)
        if not charge.attempts and not charge.deaths:
            return
        before = self.owed.pop(delivery.msg_id, Owed(0, 0))
        self.owed[delivery.msg_id] = Owed(before.attempts + charge.attempts, before.deaths + charge.deaths)
        while len(self.owed) > _MAX_OWED:
            self.owed.popitem(last=False)
        self.ctx.tell(h.ChargeOwed(self.name, delivery.msg_id))

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
            self.owed.pop(delivery.msg_id, None)  # pointless now
        if verdict.kind in ("retry", "release"):
            self.wakeups.expect(now + verdict.delay_ms / 1000)
            self.sooner(self.wakeups.next_deadline())
        tell_settled(self.ctx, self.name, delivery, verdict, now)

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
        if verdict is not None or delivery.granted is not None:
            self._reckon(delivery, verdict, now)
            return
        delivery.move(DeliveryState.ENDED)
        self.ctx.tell(h.SettlementLapsed(self.name, delivery.msg_id, "none", "its child cannot be killed"))

    def tick_mode(self, now: float) -> None:
        for delivery in list(self.reckoning.values()):
            if delivery.settle_at is None:
                continue
            if now >= delivery.settle_at:
                self._ask(delivery)
            else:
                self.sooner(delivery.settle_at)

    @property
    def reading(self) -> bool:
        return self._permits > 0

    @property
    def open_work(self) -> int:
        return len(self.attempts) + sum(1 for delivery in self.reckoning.values() if not delivery.lingers)

    def give_up_reckoning(self) -> int:
        count = len(self.reckoning)
        for delivery in list(self.reckoning.values()):
            del self.reckoning[delivery.id]
            delivery.move(DeliveryState.ENDED)
            verdict = delivery.verdict
            kind = "none" if verdict is None else verdict.kind
            self.ctx.tell(h.SettlementLapsed(self.name, delivery.msg_id, kind, "the supervisor stops; not charged"))
        return count

    def held(self) -> list[Delivery]:
        return [*self._in_hand(), *self.reckoning.values()]

    def _in_hand(self) -> Iterator[Delivery]:
        return (d for d in self.attempts.values() if d.state is not DeliveryState.PERMITTED)

    def snapshot(self, now: float) -> QueueSnapshot:
        deciding = sum(1 for d in self.attempts.values() if d.state is DeliveryState.DECIDED)
        return self._snapshot(now, waiting=0, settling=deciding, owed=len(self.owed) + len(self.reckoning))

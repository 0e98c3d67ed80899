"""Regular mode: claim in batches, dispatch one message a child, renew, settle.

    Claimed ──▶ WAITING ──▶ (LOADING) ──▶ DISPATCHED ──▶ RUNNING ──▶ SETTLING ──▶ ENDED
                   │                          │             │
                   └── given back unrun       └── its child died before the start: WAITING again

The parent owns every lease and every settlement; a child knows nothing of the database.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf
from typing import Final

from shared.pgmq.records import ClaimedRow, RenewResult, SettleResult
from shared.wire.frames import MAX_BODY_BYTES
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.accounts import CLEAN, parse_accounts
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery
from supervisor.core.leases import Leases
from supervisor.core.pacing import Pacing
from supervisor.core.queue import QueueMachine
from supervisor.core.settings import QueueSettings
from supervisor.core.settling import Settling
from supervisor.core.snapshot import QueueSnapshot
from supervisor.core.states import ChildState, DeliveryState
from supervisor.core.types import ClaimId, DeathCause, DeathFacts, ErrorInfo, Outcome, OutcomeKind, StopReason

_CLAIM_BYTES: Final = 16 << 20  # bodies in one result
_MAX_SETTLING: Final = 5000
_CLAIMS_AT_ONCE: Final = 2
_BUDGET_AGAIN_S: Final = 0.1
_LOADING_MARGIN_S: Final = 0.05  # before the end of its lease a message whose body is not there is given back
_MAX_DISPATCH_BYTES: Final = MAX_BODY_BYTES - (1 << 16)


class RegularQueue(QueueMachine):
    def __init__(self, ctx: Context, settings: QueueSettings) -> None:
        super().__init__(ctx, settings)
        self.pacing = Pacing(self.timing.hold_ahead_s, settings.max_in_flight, settings.concurrency)
        self.leases = Leases(ctx, self.name, settings.visibility_timeout_s, self._lost)
        self.settling = Settling(ctx, self.name, self.wakeups, self.judge.refund)
        self.waiting: deque[Delivery] = deque()
        self.loading: dict[ClaimId, Child] = {}
        self.claiming = 0  # claims under way
        self._asked = 0  # messages that they may bring, at most
        self._overlaps = False  # the queue is long: two claims at a time (ADR 0025)
        self._brought_at = -inf  # when the youngest claim that brought messages was asked for
        self._gather_acks_s = ctx.settings.timing.gather_acks_s
        self._hard_timeout_s = settings.hard_timeout_s
        self._enough = 0  # with more than so many waiting nothing is claimed

    # --- claim ------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        if self.waiting:
            self._dispatch(now)
        # The first test is the cheap one that nearly always decides under load.
        if len(self.waiting) > self._enough or self.claiming == _CLAIMS_AT_ONCE or not self.wakeups.hungry:
            return
        if self.claiming and (not self._overlaps or self.ctx.overlapping):
            return
        if self.may_read and now >= self.claim_not_before:
            self._claim(now)

    def _claim(self, now: float) -> None:
        ready = self.pool.ready
        if ready == 0 or len(self.settling) >= _MAX_SETTLING:
            return
        ahead = self.pacing.ahead(ready)
        self._enough = ahead // 2  # claims are cheaper in batches: the next one when half of it is gone
        waiting = len(self.waiting) + self._asked
        if waiting > self._enough:
            return
        room = min(self.pool.free + ahead, self.pacing.max_in_flight - self.pool.busy) - waiting
        held_bytes = self.ctx.held_bytes + self.claiming * _CLAIM_BYTES
        budget = min(_CLAIM_BYTES, self.ctx.settings.max_held_bytes - held_bytes)
        if room <= 0:
            return
        if budget <= 0:
            self.sooner(now + _BUDGET_AGAIN_S)  # another queue holds it, and will not tell us
            return
        limit = min(room, self.settings.claim_batch_size)
        if self.claiming and limit < self.settings.claim_batch_size:
            return  # not worth a second one
        self.claims_attempted_at = now
        if self.settling.owes_refunds or self._loses_a_lease(now):
            return  # they are the attempt: what an outage cost nobody is given back before we claim it again
        self.ctx.overlapping = self.ctx.overlapping or self.claiming > 0
        self.claiming += 1
        self._asked += limit
        self.ctx.do(c.Claim(self.name, limit, self.settings.visibility_timeout_s, budget))

    def _loses_a_lease(self, now: float) -> bool:
        """A lease ran out while we stood still, and its child is about to be gone: then the message is refunded."""
        held = (child.delivery for child in self.pool.children.values())
        return any(d is not None and 0.0 < d.lease_deadline <= now and not d.fence_lost for d in held)

    def _answered(self) -> None:
        if self.claiming == _CLAIMS_AT_ONCE:
            self.ctx.overlapping = False
        self.claiming -= 1
        self._asked = self.claiming * self.settings.claim_batch_size

    def claimed(self, event: e.Claimed, now: float) -> None:
        rows, asked_at = event.rows, event.asked_at
        self._answered()
        self.read_succeeded()
        if asked_at >= self._brought_at:
            self._overlaps = event.full and self.settings.concurrency > 1  # one child may count on the order of vt
        if rows:
            self._brought_at = max(self._brought_at, asked_at)
            self.wakeups.found(reading=self.reading)
            self.ctx.tell(h.MessagesClaimed(self.name, len(rows)))
        elif asked_at >= self._brought_at:  # else it looked before the one that found something
            self.wakeups.found_nothing(now, event.next_visible_s, reading=self.reading)
            self.sooner(self.wakeups.next_deadline())
        for row in rows:
            self._take_in(row, asked_at, now)
        if rows and not self.may_read:
            self.give_back_waiting(now, "drain" if self.ctx.draining else "paused")
        self.advance(now)
        if self._overlaps:
            self.advance(now)  # the second claim
        if self.waiting:
            self.sooner(self._waiting_limit(self.waiting[0]))

    def _take_in(self, row: ClaimedRow, asked_at: float, now: float) -> None:
        fence = row.fence
        accounts = CLEAN
        if row.accounts is not None:
            accounts = parse_accounts(row.accounts, self.name, fence.msg_id, fence.read_ct)
        stored = accounts
        if self.settling.waiting and (carried := self.settling.carry_over(fence)) is not None:
            accounts = replace(accounts, refunds=max(accounts.refunds, carried.refunds))
        delivery = Delivery(self.ctx.next_claim(), DeliveryState.WAITING, now, fence)
        delivery.accounts, delivery.stored = accounts, stored
        delivery.attempt = accounts.attempt(fence.read_ct)
        delivery.headers, delivery.body = row.headers, row.body
        delivery.body_loaded, delivery.body_bytes = row.body_loaded, row.body_bytes
        delivery.enqueued_us, delivery.visible_us = row.enqueued_us, row.visible_us
        self.leases.claimed(delivery, asked_at, row.lease_s)
        if delivery.attempt > self.settings.max_attempts:
            # Delivered again and again without a verdict: it ended its supervisor each time, or its leases lapsed.
            why = f"{fence.read_ct} deliveries, {self.settings.max_attempts} attempts allowed, and no verdict"
            failed = Outcome(OutcomeKind.ERROR, error=ErrorInfo("AttemptsExhausted", why, ""))
            self.settling.decide(delivery, self.judge.of_outcome(delivery, failed), now)
            return
        if row.body_loaded:
            self.ctx.held_bytes += row.body_bytes
        self.waiting.append(delivery)

    def claim_failed(self, error: str, now: float) -> None:
        self._answered()
        self._overlaps = False
        if now >= self.claim_not_before:  # two that fail together are one failure
            self.read_failed(error, now)
        self.sooner(self.claim_not_before)

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        free = self.pool.free
        while free and self.waiting:
            delivery = self._next_waiting()
            if now >= self._waiting_limit(delivery):
                self._give_back(delivery, "slow", now)
                continue
            free -= 1
            if delivery.body_loaded:
                self._send(self.pool.take(), delivery, now)
            else:
                child = self.pool.reserve()
                child.delivery = delivery
                delivery.move(DeliveryState.LOADING)
                self.loading[delivery.id] = child
                self.ctx.do(c.FetchBody(self.name, delivery.id, delivery.fence))
                self.sooner(min(delivery.renew_at, delivery.lease_deadline - _LOADING_MARGIN_S))

    def _next_waiting(self) -> Delivery:
        delivery = self.waiting.popleft()
        if delivery.body_loaded:
            self.ctx.held_bytes -= delivery.body_bytes
        return delivery

    def _send(self, child: Child, delivery: Delivery, now: float) -> None:
        """`child` is BUSY. The body is kept until the handler starts: the child may die before."""
        child.delivery = delivery
        delivery.move(DeliveryState.DISPATCHED)
        delivery.dispatched_at = now
        self.ctx.do(
            c.Dispatch(
                child.id,
                delivery.id,
                delivery.fence.msg_id,
                delivery.attempt,
                delivery.fence.read_ct,
                delivery.enqueued_us,
                self._hard_timeout_s,
                delivery.headers,
                delivery.body,
                delivery.lease_deadline,
            )
        )
        if child.max_messages is not None:
            self.pool.about_to_wear_out(child, now, self.pacing.estimate_s)
        self.sooner(self.limits.at_dispatch(delivery))
        if not self.leases.renewing:
            self.sooner(delivery.renew_at)

    def body_fetched(self, claim_id: ClaimId, found: bool, body: bytes | None, now: float) -> None:
        child = self.loading.pop(claim_id, None)
        if child is None or child.delivery is None or child.delivery.id != claim_id:
            return
        delivery = child.delivery
        if child.state is ChildState.KILLED:  # it waits for the end of this child
            delivery.body, delivery.body_loaded, delivery.fence_lost = body, found, not found
        elif not found:
            self.pool.vacate(child, now, finished=False)
            delivery.move(DeliveryState.ENDED)
            self.ctx.tell(h.LeaseLost(self.name, delivery.msg_id, "its row is gone or not ours any more"))
        elif body is not None and len(body) + len(delivery.headers or b"") > _MAX_DISPATCH_BYTES:
            self.pool.vacate(child, now, finished=False)
            too_large = ErrorInfo(
                "MessageTooLarge", f"{len(body)} bytes; at most {_MAX_DISPATCH_BYTES} can be sent", ""
            )
            outcome = Outcome(OutcomeKind.INVALID_MESSAGE, error=too_large)
            self.settling.decide(delivery, self.judge.of_outcome(delivery, outcome), now)
        else:
            delivery.body, delivery.body_loaded = body, True
            self.pool.occupy(child)
            self._send(child, delivery, now)
        self.advance(now)

    def body_fetch_failed(self, claim_id: ClaimId, error: str, now: float, *, permanent: bool) -> None:
        if claim_id not in self.loading:
            return
        delivery = self._stop_loading(claim_id, now)
        if delivery is not None:
            if permanent:  # no handler will ever see it
                unreadable = Outcome(OutcomeKind.INVALID_MESSAGE, error=ErrorInfo("MessageUnreadable", error, ""))
                verdict = self.judge.of_outcome(delivery, unreadable)
            else:
                verdict = self.judge.refund(delivery, "not_started", delay_ms=1000)
            self.settling.decide(delivery, verdict, now)
        self.advance(now)

    def started(self, child: Child, claim_id: ClaimId, now: float) -> None:
        delivery = child.delivery
        if delivery is None or delivery.id != claim_id or delivery.state is not DeliveryState.DISPATCHED:
            return
        self._begun(child, delivery, now)
        self.sooner(self.limits.at_start(delivery))

    def _begun(self, child: Child, delivery: Delivery, now: float) -> None:
        delivery.move(DeliveryState.RUNNING)
        delivery.started_at = now
        delivery.body = delivery.headers = None
        wait_s = max(0.0, delivery.fence.read_at_us - delivery.visible_us) / 1e6 + (now - delivery.claimed_at)
        self.ctx.tell(
            h.MessageStartedRunning(self.name, delivery.fence.msg_id, delivery.attempt, child.id, child.pid, wait_s)
        )

    # --- results ----------------------------------------------------------------------------------------------------

    def finished(self, child: Child, claim_id: ClaimId, outcome: Outcome, now: float) -> None:
        """A whole result counts, also when its child is being killed at this moment."""
        delivery = child.delivery
        if delivery is None or delivery.id != claim_id:
            return
        if delivery.state is DeliveryState.DISPATCHED:
            # The result came before anybody looked for the start: it took at most the time since the dispatch.
            self._begun(child, delivery, now)
            delivery.started_at = delivery.dispatched_at
        delivery.finished_at = now
        self.pacing.measured(now - delivery.dispatched_at)
        self.pool.vacate(child, now, finished=True)
        if delivery.fence_lost:
            self._give_back(delivery, "lease_lost", now)  # refused by the fence, unless nobody has claimed it since
        elif self.ctx.acks_off:
            self.settling.decide(delivery, self.judge.refund(delivery, "shutdown"), now)
        elif now >= delivery.lease_deadline:
            # Nothing but a refund can pass the guard now; it does if nobody has claimed the message since.
            self.ctx.tell(h.LeaseLost(self.name, delivery.msg_id, "its lease ran out before its result came"))
            self.settling.decide(delivery, self.judge.refund(delivery, "lease_lost"), now)
        else:
            quick = (self.pacing.estimate_s or 0.0) < self._gather_acks_s and not self.ctx.draining
            self.settling.decide(delivery, self.judge.of_outcome(delivery, outcome), now, gather=quick)
            self.next_at = min(self.next_at, self.settling.say_at)
        self.advance(now)

    def settled(self, results: tuple[SettleResult, ...], now: float) -> None:
        self.settling.settled(results, now)
        self.heard_of_database(self.settling.unheard, now)
        if self.settling.waiting:
            self.sooner(self.settling.tick(now))
        if self.wakeups.timer_at < self.next_at:
            self.sooner(self.wakeups.next_deadline())
        self.advance(now)

    # --- leases -----------------------------------------------------------------------------------------------------

    def renewed(self, results: tuple[RenewResult, ...], asked_at: float, now: float) -> None:
        self.heard_of_database(None, now)
        self.leases.renewed(self.pool.children.values(), results, asked_at, now)
        self.next_at = now

    def renew_failed(self, error: str, now: float) -> None:
        self.heard_of_database(error, now)
        self.leases.failed(self.pool.children.values(), error, now)
        self.next_at = now

    def _lost(self, child: Child, delivery: Delivery, now: float) -> None:
        """Somebody else owns it: nothing of ours may touch it, and its handler must end."""
        if delivery.state is DeliveryState.LOADING:
            self.loading.pop(delivery.id, None)
            self.pool.vacate(child, now, finished=False)
            delivery.move(DeliveryState.ENDED)
        else:
            self.limits.stop(child, delivery, StopReason.LEASE_LOST, now)

    def _waiting_limit(self, delivery: Delivery) -> float:
        """How long it may wait: to its first renewal, and never longer than the hold limit."""
        return min(delivery.renew_at, delivery.claimed_at + self.timing.hold_limit_s)

    def give_back_waiting(self, now: float, reason: str) -> None:
        while self.waiting:
            self._give_back(self._next_waiting(), reason, now)
        for claim_id in list(self.loading):
            delivery = self._stop_loading(claim_id, now)
            if delivery is not None:
                self._give_back(delivery, reason, now)

    def _stop_loading(self, claim_id: ClaimId, now: float) -> Delivery | None:
        """Take a message back from the child that was reserved for it; the body that is on its way is not awaited."""
        child = self.loading.pop(claim_id)
        delivery = child.delivery
        if delivery is not None:
            self.pool.vacate(child, now, finished=False)
        return delivery

    def _give_back(self, delivery: Delivery, reason: str, now: float) -> None:
        self.settling.decide(delivery, self.judge.refund(delivery, reason), now)

    # --- deaths -----------------------------------------------------------------------------------------------------

    def died(self, child: Child, facts: DeathFacts, now: float) -> None:
        """Failure model: 'child dies'. Charged to the one message in its hands, or to none."""
        delivery = child.delivery
        cause = self.pool.ended(child, now, facts)
        self.next_at = now
        if delivery is None:
            self.tell_ended(child, cause, facts, None, None)
            return
        child.delivery = None
        self.loading.pop(delivery.id, None)
        if delivery.state in (DeliveryState.LOADING, DeliveryState.DISPATCHED):
            self._died_before_start(child, delivery, cause, facts, now)
            return
        delivery.finished_at = now
        if delivery.fence_lost:
            self.tell_ended(child, cause, facts, delivery, None)
            self._give_back(delivery, "lease_lost", now)
            return
        if self.ctx.acks_off:
            verdict = self.judge.refund(delivery, "shutdown")
        else:
            verdict = self.judge.of_death(delivery, cause, facts)
        if cause is DeathCause.LEASE_LOST:
            self.ctx.tell(h.LeaseLost(self.name, delivery.msg_id, "its lease ran out before it could be renewed"))
        self.tell_ended(child, cause, facts, delivery, verdict)
        self.settling.decide(delivery, verdict, now)

    def _died_before_start(
        self, child: Child, delivery: Delivery, cause: DeathCause, facts: DeathFacts, now: float
    ) -> None:
        """Not its fault: to another child, uncharged, but not for ever."""
        early = delivery.accounts.early + 1
        if delivery.fence_lost:
            delivery.move(DeliveryState.ENDED)
            self.tell_ended(child, cause, facts, delivery, None)
        elif delivery.stop_reason is StopReason.CANCELLED:
            self.tell_ended(child, cause, facts, delivery, None)
            self._cancel_unstarted(delivery, now)
        elif not self.may_read or cause is DeathCause.LEASE_LOST or now >= self._waiting_limit(delivery):
            self.tell_ended(child, cause, facts, delivery, None)
            self._give_back(delivery, "not_started", now)
        elif delivery.state is DeliveryState.LOADING:  # the child never had it
            self.tell_ended(child, cause, facts, None, None)
            self._wait_again(delivery)
        elif early <= self.settings.max_deaths or cause is DeathCause.UNRESPONSIVE:
            delivery.accounts = replace(delivery.accounts, early=early)
            self.tell_ended(child, cause, facts, delivery, None)
            if early > self.settings.max_deaths:
                self.settling.decide(delivery, self.judge.refund(delivery, "not_started", delay_ms=5000), now)
            else:
                self._wait_again(delivery)
        else:
            verdict = self.judge.of_death(delivery, cause, facts)
            self.tell_ended(child, cause, facts, delivery, verdict)
            self.settling.decide(delivery, verdict, now)

    def _wait_again(self, delivery: Delivery) -> None:
        delivery.move(DeliveryState.WAITING)
        place = 0  # by age: the first one that waits is the first whose time is up
        while place < len(self.waiting) and self.waiting[place].claimed_at < delivery.claimed_at:
            place += 1
        self.waiting.insert(place, delivery)
        self.sooner(self._waiting_limit(delivery))
        if delivery.body_loaded:
            self.ctx.held_bytes += delivery.body_bytes

    def unkillable(self, child: Child, _now: float) -> None:
        """Killed and still there: its lease must lapse, since it may still work."""
        delivery = child.delivery
        if delivery is None:
            return
        child.delivery = None
        self.loading.pop(delivery.id, None)
        delivery.move(DeliveryState.ENDED)
        self.ctx.tell(h.SettlementLapsed(self.name, delivery.msg_id, "none", "its child cannot be killed"))

    # --- time and views ---------------------------------------------------------------------------------------------

    def tick_mode(self, now: float) -> None:
        if self.waiting and now >= self._waiting_limit(self.waiting[0]):
            self._turned_slow(now)
        if self.waiting:
            self.sooner(self._waiting_limit(self.waiting[0]))
        for claim_id, child in list(self.loading.items()):
            if child.delivery is None:
                continue
            limit = child.delivery.lease_deadline - _LOADING_MARGIN_S
            if now >= limit:
                self.body_fetch_failed(claim_id, "its lease ran out", now, permanent=False)
            else:
                self.sooner(limit)
        self.sooner(self.leases.tick(self.pool.children.values(), now))
        self.sooner(self.settling.tick(now))

    def _turned_slow(self, now: float) -> None:
        """Work turned slow: what waits starves other hosts, so it goes back, and less is held from now on."""
        self.pacing.turned_slow(self.timing.hold_limit_s)
        while self.waiting:
            self._give_back(self._next_waiting(), "slow", now)

    def cancel(self, msg_id: int, now: float) -> bool:
        for delivery in self.waiting:
            if delivery.msg_id == msg_id:
                self.waiting.remove(delivery)
                if delivery.body_loaded:
                    self.ctx.held_bytes -= delivery.body_bytes
                self._cancel_unstarted(delivery, now)
                return True
        for claim_id, child in self.loading.items():
            if child.delivery is not None and child.delivery.msg_id == msg_id:
                loading = self._stop_loading(claim_id, now)
                if loading is not None:
                    self._cancel_unstarted(loading, now)
                return True
        return super().cancel(msg_id, now)

    def _cancel_unstarted(self, delivery: Delivery, now: float) -> None:
        delivery.stop_reason = StopReason.CANCELLED
        self.settling.decide(delivery, self.judge.of_outcome(delivery, Outcome(OutcomeKind.STOPPED)), now)

    def drain(self, now: float) -> None:
        self.settling.say_gathered(now)  # while it may be acknowledged
        super().drain(now)

    @property
    def reading(self) -> bool:
        return self.claiming > 0

    @property
    def open_work(self) -> int:
        # A claim that is under way may bring messages, which must be given back.
        return len(self.waiting) + len(self.settling) + self.pool.busy + self.claiming

    def held(self) -> list[Delivery]:
        return [*self.waiting, *(d for ch in self.pool.children.values() if (d := ch.delivery) is not None)]

    def snapshot(self, now: float) -> QueueSnapshot:
        return self._snapshot(
            now,
            waiting=len(self.waiting),
            settling=len(self.settling),
            owed=0,
            overdue=self.leases.overdue(self.pool.children.values(), now),
            estimate=self.pacing.estimate_s,
        )

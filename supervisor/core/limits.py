"""Limits of a message in a child's hands: dispatch deadline, soft and hard timeout, lease, and the ladders.

One function looks at one busy child and says what is due; the clock is the parent's alone, so that a handler that
blocks in C code is under the same limits as any other.
"""

from __future__ import annotations

from math import inf

from supervisor.core import commands as c
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery
from supervisor.core.pool import Pool
from supervisor.core.settings import QueueSettings
from supervisor.core.states import ChildState, DeliveryState
from supervisor.core.types import DeathCause, StopReason


class Limits:
    def __init__(self, ctx: Context, settings: QueueSettings, pool: Pool) -> None:
        self._ctx = ctx
        self._settings = settings
        self._timing = ctx.settings.timing
        self._permit_deadline_s = ctx.settings.permit_deadline_s
        self._commit_deadline_s = ctx.settings.commit_deadline_s
        self._pool = pool
        vt = settings.visibility_timeout_s
        # The child must be gone, not only signalled, before the lease runs out.
        self._lease_margin_s = min(1.0, vt * 0.1)
        first = (settings.soft_timeout_s, settings.hard_timeout_s)
        self._first_limit_s = min((limit for limit in first if limit is not None), default=inf)

    def at_dispatch(self, delivery: Delivery) -> float:
        """First deadline of a message that was just dispatched; cheap, as it is on the hot path."""
        if delivery.state is DeliveryState.PERMITTED:
            return delivery.dispatched_at + self._permit_deadline_s
        return min(delivery.dispatched_at + self._timing.dispatch_deadline_s, self._lease_limit(delivery))

    def at_start(self, delivery: Delivery) -> float:
        """Next deadline of a message that has just started."""
        # Its lease was looked at when it was dispatched.
        return (delivery.started_at or 0.0) + self._first_limit_s

    def stop(self, child: Child, delivery: Delivery, reason: StopReason, now: float) -> None:
        """Ask to stop. A stronger reason replaces a weaker one; what the handler was told first stays told."""
        if delivery.stop_reason is not None and _STRENGTH[reason] <= _STRENGTH[delivery.stop_reason]:
            return
        delivery.stop_reason = reason
        delivery.stop_at = now
        child.termed = False
        self._ctx.do(c.SendStop(child.id, delivery.id, reason))

    def check(self, child: Child, now: float) -> float:
        """Carry out what is due for a busy child; return its next deadline."""
        delivery = child.delivery
        if delivery is None or child.state is not ChildState.BUSY:
            return inf
        cause = self._due_kill(delivery, now)
        if cause is not None:
            self._pool.kill(child, now, cause, with_stack=cause is not DeathCause.PROTOCOL)
            return child.deadline
        soft = self._settings.soft_timeout_s
        if soft is not None and delivery.started_at is not None and now >= delivery.started_at + soft:
            self.stop(child, delivery, StopReason.SOFT_TIMEOUT, now)
        if delivery.stop_reason in _LADDER and not child.termed and now >= delivery.stop_at + self._timing.term_step_s:
            child.termed = True
            self._ctx.do(c.SendTerm(child.id))
        return self._next(child, delivery, now)

    def _due_kill(self, delivery: Delivery, now: float) -> DeathCause | None:
        timing = self._timing
        hard = self._settings.hard_timeout_s
        if now >= self._lease_limit(delivery):
            return DeathCause.LEASE_LOST
        if delivery.fence_lost and now >= delivery.stop_at + timing.term_step_s:
            return DeathCause.LEASE_LOST
        match delivery.state:
            case DeliveryState.DISPATCHED if now >= delivery.dispatched_at + timing.dispatch_deadline_s:
                return DeathCause.UNRESPONSIVE
            case DeliveryState.PERMITTED | DeliveryState.CLAIMED if (
                now >= delivery.dispatched_at + self._permit_deadline_s
            ):
                return DeathCause.UNRESPONSIVE
            case DeliveryState.DECIDED if now >= delivery.decided_at + self._commit_deadline_s:
                return DeathCause.UNRESPONSIVE
            case _:
                pass
        running = delivery.state is DeliveryState.RUNNING and delivery.started_at is not None
        if running and hard is not None and now >= (delivery.started_at or 0.0) + hard:
            return DeathCause.HARD_TIMEOUT
        if running and delivery.stop_reason is StopReason.CANCELLED and now >= delivery.stop_at + timing.cancel_kill_s:
            return DeathCause.CANCELLED
        return None

    def _lease_limit(self, delivery: Delivery) -> float:
        if delivery.lease_deadline == 0.0:
            return inf  # transactional: the row lock is the lease
        return delivery.lease_deadline - self._lease_margin_s

    def _next(self, child: Child, delivery: Delivery, now: float) -> float:
        timing = self._timing
        deadline = self._lease_limit(delivery)
        match delivery.state:
            case DeliveryState.DISPATCHED:
                deadline = min(deadline, delivery.dispatched_at + timing.dispatch_deadline_s)
            case DeliveryState.PERMITTED | DeliveryState.CLAIMED:
                deadline = min(deadline, delivery.dispatched_at + self._permit_deadline_s)
            case DeliveryState.DECIDED:
                deadline = min(deadline, delivery.decided_at + self._commit_deadline_s)
            case DeliveryState.RUNNING:
                started = delivery.started_at or 0.0
                hard, soft = self._settings.hard_timeout_s, self._settings.soft_timeout_s
                if hard is not None:
                    deadline = min(deadline, started + hard)
                if soft is not None and now < started + soft:
                    deadline = min(deadline, started + soft)
                if delivery.stop_reason is StopReason.CANCELLED:
                    deadline = min(deadline, delivery.stop_at + timing.cancel_kill_s)
            case _:
                pass
        if delivery.stop_reason in _LADDER and not child.termed:
            deadline = min(deadline, delivery.stop_at + timing.term_step_s)
        if delivery.fence_lost:
            deadline = min(deadline, delivery.stop_at + timing.term_step_s)
        return deadline


_STRENGTH = {
    StopReason.SOFT_TIMEOUT: 0,
    StopReason.SHUTDOWN: 1,
    StopReason.CANCELLED: 2,
    StopReason.LEASE_LOST: 3,
}
_LADDER = frozenset({StopReason.CANCELLED, StopReason.LEASE_LOST})

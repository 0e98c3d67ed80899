"""Leases of what children work on: renewed centrally about half way, three answers a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from shared.pgmq.records import RenewOutcome, RenewResult
from supervisor.core import commands as c
from supervisor.core import happenings as h
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery
from supervisor.core.states import DeliveryState
from supervisor.core.types import ChildId, ClaimId, QueueName

_HELD = frozenset({DeliveryState.LOADING, DeliveryState.DISPATCHED, DeliveryState.RUNNING})


class Leases:
    """`lost(child, delivery)` is called for a claim that belongs to somebody else now."""

    def __init__(
        self, ctx: Context, queue: QueueName, lease_s: float, lost: Callable[[Child, Delivery, float], None]
    ) -> None:
        self._ctx = ctx
        self._queue = queue
        self._lease_s = lease_s
        self._lost = lost
        self.renewing = False

    def claimed(self, delivery: Delivery, asked_at: float, lease_s: float) -> None:
        """Deadline by our clock: from before the query, and never more than the lease that was asked for."""
        lease_s = min(lease_s, self._lease_s)
        delivery.lease_deadline = asked_at + lease_s
        delivery.renew_at = asked_at + lease_s * (0.45 + 0.1 * self._ctx.uniform())

    def tick(self, children: Iterable[Child], now: float) -> float:
        """Ask for what is due, in one statement; returns when to look again."""
        held = [d for child in children if (d := child.delivery) is not None and _renewable(d)]
        if not held or self.renewing:
            return inf
        earliest = min(d.renew_at for d in held)
        if now < earliest:
            return earliest
        # What would be due soon goes along: one statement a queue, not one a message.
        due = [d for d in held if d.renew_at <= now + self._lease_s * 0.1]
        remaining = min(d.lease_deadline for d in due) - now
        self.renewing = True
        fences = tuple((d.id, d.fence) for d in due)
        self._ctx.do(c.Renew(self._queue, fences, self._lease_s, max(0.1, remaining / 3)))
        return inf

    def renewed(self, children: Iterable[Child], results: tuple[RenewResult, ...], asked_at: float, now: float) -> None:
        self.renewing = False
        by_claim = {child.delivery.id: child for child in children if child.delivery is not None}
        deadlines: list[tuple[ChildId, float]] = []
        done = 0
        for claim_id, outcome, lease_s in results:
            child = by_claim.get(ClaimId(claim_id))
            delivery = None if child is None else child.delivery
            if child is None or delivery is None or not _renewable(delivery):
                continue  # it got a verdict meanwhile
            match outcome:
                case RenewOutcome.DONE:
                    done += 1
                    self.claimed(delivery, asked_at, lease_s)
                    deadlines.append((child.id, delivery.lease_deadline))
                case RenewOutcome.BUSY:
                    self._soon(delivery, now)
                case RenewOutcome.LOST:
                    self._ctx.tell(h.LeaseLost(self._queue, delivery.msg_id, "a renewal matched no row of ours"))
                    delivery.fence_lost = True
                    self._lost(child, delivery, now)
        if done:
            self._ctx.tell(h.LeasesRenewed(self._queue, done))
        if deadlines:
            self._ctx.do(c.GuardLeases(tuple(deadlines)))

    def failed(self, children: Iterable[Child], error: str, now: float) -> None:
        """A failed renewal is no lost lease: again, until the deadline."""
        self.renewing = False
        self._ctx.tell(h.LeaseRenewalFailed(self._queue, error))
        for child in children:
            if child.delivery is not None and _renewable(child.delivery) and child.delivery.renew_at <= now:
                self._soon(child.delivery, now)

    def _soon(self, delivery: Delivery, now: float) -> None:
        delivery.renew_at = now + max(0.1, (delivery.lease_deadline - now) / 8)

    def overdue(self, children: Iterable[Child], now: float) -> int:
        """Renewals that should have been asked for long ago: the loop does not make progress."""
        late = self._lease_s * 0.25
        return sum(
            1
            for ch in children
            if ch.delivery is not None and _renewable(ch.delivery) and now > ch.delivery.renew_at + late
        )


def _renewable(delivery: Delivery) -> bool:
    return delivery.state in _HELD and not delivery.fence_lost

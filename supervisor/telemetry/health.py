"""Liveness: are claims, renewals and settlements attempted on time? And readiness: has every queue what it needs?

A snapshot shows one instant, and being late for an instant is normal. So a reason counts when it has held over several
looks, which the telemetry's own tick takes each second, whether or not anybody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.core.snapshot import QueueSnapshot, Snapshot
from supervisor.core.states import ChildState

_HEARTBEAT_S: Final = 10.0  # the driver turns at least each second
_RENEWAL_S: Final = 5.0
_ATTEMPT_SLACK_S: Final = 15.0  # the backoff between two attempts, and what an answer may be later than its limit


def longest_attempt_s(*, acquire_s: float, connect_s: float, statement_s: float, permit_s: float) -> float:
    """Seconds from one attempt at a claim or a settlement to the next while the database takes and does not answer.

    Waiting for a session, opening it, waiting for its answer; or the permit of a transactional child. Not to be alive
    before that has passed would stop handlers that an outage does not touch.
    """
    return max(acquire_s + connect_s + statement_s, permit_s) + _ATTEMPT_SLACK_S


@dataclass(slots=True)
class _Since:
    """Since when something has been so, and what it looked like then."""

    at: float
    seen: object


class Health:
    """Looks at snapshots; decides nothing else."""

    def __init__(
        self, *, polling_s: Mapping[str, float], settle_attempts: Callable[[str], int], attempt_s: float
    ) -> None:
        """`polling_s`: by queue; `settle_attempts`: how many settlements a queue has tried so far.

        `attempt_s`: what one attempt may take, see `longest_attempt_s`.
        """
        self._polling_s = polling_s
        self._attempt_s = attempt_s
        self._settle_attempts = settle_attempts
        self._claim: dict[str, _Since] = {}
        self._renewal: dict[str, _Since] = {}
        self._settle: dict[str, _Since] = {}

    def observe(self, snapshot: Snapshot, *, heartbeat_at: float | None, now: float) -> list[str]:
        """Take a look; returns why the loop does not make progress, nothing when it does."""
        reasons: list[str] = []
        if heartbeat_at is not None and now - heartbeat_at > _HEARTBEAT_S:
            reasons.append(f"the driver has not turned for {now - heartbeat_at:.0f} s")
        for queue in snapshot.queues:
            name = queue.queue
            claim_s = 2 * self._polling_s.get(name, 5.0) + self._attempt_s
            should_claim = snapshot.state == "running" and _could_claim(queue)
            if self._held(self._claim, name, should_claim, queue.claims_attempted_at, now) > claim_s:
                reasons.append(f"{name}: nothing was claimed for more than {claim_s:.0f} s though children are idle")
            if self._held(self._renewal, name, queue.overdue_renewals > 0, None, now) > _RENEWAL_S:
                reasons.append(f"{name}: {queue.overdue_renewals} leases are overdue for renewal")
            attempts = self._settle_attempts(name)
            if self._held(self._settle, name, queue.settling > 0, attempts, now) > self._attempt_s:
                reasons.append(f"{name}: no settlement was attempted for more than {self._attempt_s:.0f} s")
        return reasons

    @staticmethod
    def _held(known: dict[str, _Since], name: str, is_so: bool, seen: object, now: float) -> float:
        """Return for how long `is_so` has been true with nothing seen to change, in seconds."""
        if not is_so:
            known.pop(name, None)
            return 0.0
        since = known.get(name)
        if since is None or since.seen != seen:
            known[name] = _Since(now, seen)
            return 0.0
        return now - since.at


def _could_claim(queue: QueueSnapshot) -> bool:
    """An idle child, nothing waiting for it, nobody who forbids to claim: then claims must be attempted."""
    if queue.paused or queue.parked or queue.waiting:
        return False
    return any(child.state == ChildState.IDLE for child in queue.children)


def unready(snapshot: Snapshot | None) -> dict[str, str]:
    """Return why the supervisor is not ready, by queue; "" for reasons of the whole. Empty: ready."""
    if snapshot is None:
        return {"": "starting"}
    if snapshot.state != "running":
        return {"": snapshot.state}
    return {queue.queue: why for queue in snapshot.queues if (why := queue.not_ready_because)}

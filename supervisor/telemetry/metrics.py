"""The metrics sink: plain integers that happenings increment. Rendering is somewhere else; here only speed counts.

`MessageStartedRunning` and `MessageSucceeded` come 20 000 times a second, so nothing here takes a lock, builds a string
or calls the client library. Everything runs on the loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final

from supervisor.core import happenings as h
from supervisor.core.types import DeadLetterReason, DeathCause
from supervisor.telemetry import facts as f

# Seconds. Handlers range from a millisecond to the default hard_timeout; settling is one round trip or a wait.
HANDLER_BOUNDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
WAIT_BOUNDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
SETTLE_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
SHUTDOWN_BOUNDS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

DEATH_CAUSES: Final = tuple(cause.value for cause in DeathCause if cause is not DeathCause.RETIRED)
RETRY_REASONS: Final = ("error", "requested", "soft_timeout", "deadlock", "signal", "exit", "hard_timeout",
                        "memory_limit", "oom", "protocol")  # fmt: skip
DEAD_LETTER_REASONS: Final = tuple(reason.value for reason in DeadLetterReason)
WAKE_SOURCES: Final = ("notify", "poll", "timer")


class Distribution:
    """Counts of observations under each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation, in seconds. A clock that went backwards counts as zero."""
        value = max(value, 0.0)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class QueueCounters:
    """The counters of one queue, named as their metrics without `_total`."""

    __slots__ = (
        "child_deaths", "child_starts", "handler_seconds", "lease_renewal_failures", "leases_lost", "leases_renewed",
        "messages_abandoned", "messages_claimed", "messages_dead_lettered", "messages_released", "messages_retried",
        "messages_succeeded", "notify_repairs", "notify_setup_failures", "processes_swept", "queue_wait_seconds",
        "settle_attempts", "settle_seconds", "wakeups",
    )  # fmt: skip

    def __init__(self) -> None:
        self.messages_claimed = 0
        self.messages_succeeded = 0
        self.messages_retried = dict.fromkeys(RETRY_REASONS, 0)
        self.messages_dead_lettered = dict.fromkeys(DEAD_LETTER_REASONS, 0)
        self.messages_abandoned = 0
        self.messages_released = 0
        self.leases_renewed = 0
        self.lease_renewal_failures = 0
        self.leases_lost = 0
        self.child_starts = 0
        self.child_deaths = dict.fromkeys(DEATH_CAUSES, 0)
        self.processes_swept = 0
        self.notify_setup_failures = 0
        self.notify_repairs = 0
        self.wakeups = dict.fromkeys(WAKE_SOURCES, 0)
        self.settle_attempts = 0  # failed ones included; no metric, /livez looks at it
        self.handler_seconds = Distribution(HANDLER_BOUNDS)
        self.queue_wait_seconds = Distribution(WAIT_BOUNDS)
        self.settle_seconds = Distribution(SETTLE_BOUNDS)


class MetricsSink:
    """Count happenings."""

    def __init__(self, queues: Iterable[str]) -> None:
        """Begin with all series of these queues at zero, so that a rate can be taken from the first event on."""
        self.queues: dict[str, QueueCounters] = {name: QueueCounters() for name in queues}
        self.database_reconnects = 0
        self.listener_reconnects = 0
        self.events_dropped = 0
        self.shutdown_timeouts = 0
        self.shutdown_seconds = Distribution(SHUTDOWN_BOUNDS)
        self.routes: Final[dict[type, Callable[..., None]]] = {
            h.MessagesClaimed: self._claimed,
            h.MessageStartedRunning: self._started,
            h.MessageSucceeded: self._succeeded,
            h.MessageRetried: self._retried,
            h.MessageDeadLettered: self._dead_lettered,
            h.MessageAbandoned: self._abandoned,
            h.MessageReleased: self._released,
            h.SettlementFailed: self._settlement_failed,
            h.SettlementLapsed: self._settlement_failed,
            h.LeasesRenewed: self._renewed,
            h.LeaseRenewalFailed: self._renewal_failed,
            h.LeaseLost: self._lost,
            h.WokenUp: self._woken,
            h.ChildStarting: self._starting,
            h.ChildEnded: self._ended,
            h.ShutdownEnded: self._shutdown_ended,
            f.ProcessesSwept: self._swept,
            f.DatabaseReconnected: self._database_reconnected,
            f.ListenerReconnected: self._listener_reconnected,
            f.NotifySetupFailed: self._notify_failed,
            f.NotifyRepaired: self._notify_repaired,
        }

    def of(self, queue: str) -> QueueCounters:
        """Return the counters of a queue; a name that was not announced is counted all the same."""
        try:
            return self.queues[queue]
        except KeyError:
            return self.queues.setdefault(queue, QueueCounters())

    def _claimed(self, happening: h.MessagesClaimed) -> None:
        self.of(happening.queue).messages_claimed += happening.count

    def _started(self, happening: h.MessageStartedRunning) -> None:
        wait_s = happening.wait_s
        if wait_s is not None:
            self.of(happening.queue).queue_wait_seconds.observe(wait_s)

    def _succeeded(self, happening: h.MessageSucceeded) -> None:
        counters = self.of(happening.queue)
        counters.messages_succeeded += 1
        counters.settle_attempts += 1
        counters.handler_seconds.observe(happening.handler_s)
        counters.settle_seconds.observe(happening.settle_s)

    def _retried(self, happening: h.MessageRetried) -> None:
        counters = self.of(happening.queue)
        counters.settle_attempts += 1
        retried = counters.messages_retried
        retried[happening.reason] = retried.get(happening.reason, 0) + 1
        if happening.handler_s is not None:
            counters.handler_seconds.observe(happening.handler_s)

    def _dead_lettered(self, happening: h.MessageDeadLettered) -> None:
        counters = self.of(happening.queue)
        counters.settle_attempts += 1
        moved = counters.messages_dead_lettered
        moved[happening.reason.value] = moved.get(happening.reason.value, 0) + 1
        if happening.handler_s is not None:
            counters.handler_seconds.observe(happening.handler_s)

    def _abandoned(self, happening: h.MessageAbandoned) -> None:
        self.of(happening.queue).messages_abandoned += 1

    def _released(self, happening: h.MessageReleased) -> None:
        counters = self.of(happening.queue)
        counters.messages_released += 1
        counters.settle_attempts += 1

    def _settlement_failed(self, happening: h.SettlementFailed | h.SettlementLapsed) -> None:
        self.of(happening.queue).settle_attempts += 1

    def _renewed(self, happening: h.LeasesRenewed) -> None:
        self.of(happening.queue).leases_renewed += happening.count

    def _renewal_failed(self, happening: h.LeaseRenewalFailed) -> None:
        self.of(happening.queue).lease_renewal_failures += 1

    def _lost(self, happening: h.LeaseLost) -> None:
        self.of(happening.queue).leases_lost += 1

    def _woken(self, happening: h.WokenUp) -> None:
        wakeups = self.of(happening.queue).wakeups
        wakeups[happening.source] = wakeups.get(happening.source, 0) + 1

    def _starting(self, happening: h.ChildStarting) -> None:
        self.of(happening.queue).child_starts += 1

    def _ended(self, happening: h.ChildEnded) -> None:
        if happening.cause is not DeathCause.RETIRED:
            self.of(happening.queue).child_deaths[happening.cause.value] += 1

    def _shutdown_ended(self, happening: h.ShutdownEnded) -> None:
        self.shutdown_seconds.observe(happening.took_s)
        self.shutdown_timeouts += happening.timed_out

    def _swept(self, happening: f.ProcessesSwept) -> None:
        self.of(happening.queue or "").processes_swept += happening.count

    def _database_reconnected(self, _: f.DatabaseReconnected) -> None:
        self.database_reconnects += 1

    def _listener_reconnected(self, _: f.ListenerReconnected) -> None:
        self.listener_reconnects += 1

    def _notify_failed(self, happening: f.NotifySetupFailed) -> None:
        self.of(happening.queue).notify_setup_failures += 1

    def _notify_repaired(self, happening: f.NotifyRepaired) -> None:
        self.of(happening.queue).notify_repairs += 1

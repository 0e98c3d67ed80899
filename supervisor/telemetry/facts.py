"""Facts of the shell: what happened outside the core's knowledge. They share the stream with the core's happenings."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.core.happenings import Happening


@dataclass(frozen=True, slots=True)
class ProcessesSwept:
    """Descendants of a handler that outlived it were killed. `queue` is None where their origin is unknown."""

    queue: str | None
    count: int
    what: str = ""  # a few command names


@dataclass(frozen=True, slots=True)
class DatabaseReconnected:
    """A connection was replaced."""

    role: str  # "claims" | "renewals" | "settlements" | ...


@dataclass(frozen=True, slots=True)
class ListenerLost:
    """The listening connection is gone."""

    error: str


@dataclass(frozen=True, slots=True)
class ListenerReconnected:
    """LISTEN stands again."""

    queues: int


@dataclass(frozen=True, slots=True)
class NotifySetupFailed:
    """Notifications cannot be had: the queue is polled."""

    queue: str
    error: str


@dataclass(frozen=True, slots=True)
class NotifyRepaired:
    """The trigger or its throttle row was missing."""

    queue: str
    what: str  # "trigger" | "throttle"


@dataclass(frozen=True, slots=True)
class PauseIsLocal:
    """The pause could not be written to the database: only this supervisor knows of it."""

    queue: str
    why: str


@dataclass(frozen=True, slots=True)
class SinkFailed:
    """A part of the telemetry failed; the work goes on. Counted in events_dropped_total."""

    sink: str
    error: str


@dataclass(frozen=True, slots=True)
class MetricsFileSkipped:
    """A child's metrics file could not be read."""

    file: str
    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Anything else that the shell wants in the log: no metric, no state."""

    topic: str
    level: str  # "debug" | "info" | "warning" | "error"
    text: str
    fields: tuple[tuple[str, object], ...] = ()


Fact = (
    ProcessesSwept
    | DatabaseReconnected
    | ListenerLost
    | ListenerReconnected
    | NotifySetupFailed
    | NotifyRepaired
    | PauseIsLocal
    | SinkFailed
    | MetricsFileSkipped
    | Noted
)

AnyHappening = Happening | Fact

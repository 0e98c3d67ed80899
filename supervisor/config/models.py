"""The sections of the configuration, key by key, with their defaults. What each key means: docs/configuration.md.

Only what can be said of one key alone is checked here; what concerns several is in `rules`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.naming import dead_letter_queue_name
from shared.pgmq.records import AckMode
from supervisor.config.values import (
    Duration,
    Flag,
    Grace,
    HandlerPath,
    MemoryLimit,
    Name,
    NonEmpty,
    OptionalDuration,
    integer,
    number,
    one_of,
)
from supervisor.core.settings import QueueSettings, RetryPolicy
from supervisor.core.types import Mode

__all__ = [
    "SECTIONS",
    "ControlSection",
    "DatabaseSection",
    "EventsSection",
    "HttpSection",
    "LogFormat",
    "LogLevel",
    "LogSection",
    "Output",
    "QueueSection",
    "RetrySection",
    "Section",
    "ShutdownSection",
    "Storage",
]


class LogFormat(StrEnum):
    """How log lines look; "auto": console on a terminal, else JSON."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Storage(StrEnum):
    """How a queue is created."""

    DURABLE = "durable"
    UNLOGGED = "unlogged"
    PARTITIONED = "partitioned"


class Output(StrEnum):
    """What becomes of a handler's stdout and stderr."""

    CAPTURE = "capture"
    INHERIT = "inherit"


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DatabaseSection(Section):
    """Connections. Times in seconds; pool_size None: "auto"."""

    dsn: NonEmpty | None = Field(default=None, repr=False)
    listen_dsn: NonEmpty | None = Field(default=None, repr=False)
    pool_size: Annotated[int | None, integer(1, 1000, none_as="auto")] = None
    connect_timeout: Duration = 10.0
    acquire_timeout: Duration = 30.0
    statement_timeout: Duration = 30.0


class ShutdownSection(Section):
    """How long a stop may take; the two add up. Seconds."""

    grace: Grace = 30.0
    kill_after: Duration = 5.0


class HttpSection(Section):
    """The HTTP side; off where the section is absent."""

    host: NonEmpty = "127.0.0.1"
    port: Annotated[int, integer(0, 65535)] = 8321
    token: NonEmpty | None = Field(default=None, repr=False)


class LogSection(Section):
    """Logging."""

    format: Annotated[LogFormat, one_of(*LogFormat)] = LogFormat.AUTO
    level: Annotated[LogLevel, one_of(*LogLevel)] = LogLevel.INFO


class ControlSection(Section):
    """The control socket; None: in the runtime directory."""

    socket: NonEmpty | None = None


class EventsSection(Section):
    """Where events go besides log and metrics; sink None: nowhere."""

    sink: HandlerPath | None = None


class RetrySection(Section):
    """Delay before attempt n+1: base x factor^(n-1), at most max. Seconds."""

    base: Duration = 1.0
    factor: Annotated[float, number(1, 1000)] = 2.0
    max: Duration = 600.0
    jitter: Flag = True


class QueueSection(Section):
    """One queue and its handler. Times in seconds, sizes in bytes, None for "none" and "auto"."""

    handler: HandlerPath
    mode: Annotated[Mode, one_of(*Mode)] = Mode.REGULAR
    concurrency: Annotated[int, integer(1, 1000)] = 1
    standby: Annotated[int, integer(0, 1000)] = 0
    visibility_timeout: Duration = 30.0
    soft_timeout: OptionalDuration = None
    hard_timeout: OptionalDuration = 1800.0
    memory_limit: MemoryLimit = None
    max_tasks_per_child: Annotated[int | None, integer(1, 1_000_000_000, none_as="none")] = None
    max_child_age: OptionalDuration = None
    claim_batch_size: Annotated[int, integer(1, 10_000)] = 100
    max_in_flight: Annotated[int | None, integer(1, 1_000_000, none_as="auto")] = None
    polling_interval: Duration = 5.0
    notify: Flag = True
    on_success: Annotated[AckMode, one_of(*AckMode)] = AckMode.DELETE
    max_attempts: Annotated[int, integer(1, 1_000_000)] = 5
    max_deaths: Annotated[int, integer(1, 1_000_000)] = 3
    retry: RetrySection = Field(default_factory=RetrySection)
    dead_letter_queue: Name | None = None
    create: Flag = True
    storage: Annotated[Storage, one_of(*Storage)] = Storage.DURABLE
    output: Annotated[Output, one_of(*Output)] = Output.CAPTURE

    def dead_letter_queue_of(self, name: str) -> str:
        """The dead-letter queue of this queue, whose name is `name`."""
        return self.dead_letter_queue or dead_letter_queue_name(name)

    def to_core(self, name: str) -> QueueSettings:
        """What the core must know."""
        return QueueSettings(
            name=name,
            handler=self.handler,
            dead_letter_queue=self.dead_letter_queue_of(name),
            mode=self.mode,
            concurrency=self.concurrency,
            standby=self.standby,
            visibility_timeout_s=self.visibility_timeout,
            soft_timeout_s=self.soft_timeout,
            hard_timeout_s=self.hard_timeout,
            memory_limit_bytes=self.memory_limit,
            max_tasks_per_child=self.max_tasks_per_child,
            max_child_age_s=self.max_child_age,
            claim_batch_size=self.claim_batch_size,
            max_in_flight=self.max_in_flight,
            polling_interval_s=self.polling_interval,
            notify=self.notify,
            on_success=self.on_success,
            max_attempts=self.max_attempts,
            max_deaths=self.max_deaths,
            retry=RetryPolicy(
                base_s=self.retry.base, factor=self.retry.factor, max_s=self.retry.max, jitter=self.retry.jitter
            ),
        )


SECTIONS: dict[str, type[Section]] = {
    "database": DatabaseSection,
    "shutdown": ShutdownSection,
    "http": HttpSection,
    "log": LogSection,
    "control": ControlSection,
    "events": EventsSection,
}

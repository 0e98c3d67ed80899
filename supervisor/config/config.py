"""The configuration as the rest of the supervisor sees it: frozen, complete, already checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from supervisor.config.models import (
    ControlSection,
    DatabaseSection,
    EventsSection,
    HttpSection,
    LogSection,
    QueueSection,
    ShutdownSection,
)
from supervisor.core.settings import CoreSettings, Timing
from supervisor.core.types import Mode

__all__ = ["Config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every section, with the database's DSN already chosen among its sources."""

    app_dir: Path  # where handlers are imported from; absolute
    source: Path | None = None  # the file that was read; absolute
    dsn_origin: str | None = None  # "--dsn", "SUPERVISOR_DSN", ..., for messages
    database: DatabaseSection = field(default_factory=DatabaseSection)
    shutdown: ShutdownSection = field(default_factory=ShutdownSection)
    http: HttpSection | None = None  # None: off
    log: LogSection = field(default_factory=LogSection)
    control: ControlSection = field(default_factory=ControlSection)
    events: EventsSection = field(default_factory=EventsSection)
    queues: Mapping[str, QueueSection] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def dsn(self) -> str:
        """The DSN of the database; only for who asked `load` for one."""
        assert self.database.dsn is not None
        return self.database.dsn

    def with_dsn(self, dsn: str) -> Config:
        """The same with another DSN: that of the embedded server, once it runs."""
        return dataclasses.replace(self, database=self.database.model_copy(update={"dsn": dsn}))

    def sessions_of_children(self) -> int:
        """How many database sessions children may hold at once: transactional ones, a successor for each queue too."""
        return sum(
            queue.concurrency + queue.standby + 1 for queue in self.queues.values() if queue.mode is Mode.TRANSACTIONAL
        )

    def to_core_settings(
        self, *, host: str, supervisor: str, version: str, timing: Timing | None = None
    ) -> CoreSettings:
        """What the core must know: plain values."""
        return CoreSettings(
            queues=tuple(queue.to_core(name) for name, queue in self.queues.items()),
            host=host,
            supervisor=supervisor,
            version=version,
            grace_s=self.shutdown.grace,
            kill_after_s=self.shutdown.kill_after,
            statement_timeout_s=self.database.statement_timeout,
            timing=timing or Timing(),
        )

"""The telemetry of one supervisor, put together: what the composition root holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.clock import boottime
from supervisor.core.settings import CoreSettings
from supervisor.core.snapshot import Snapshot
from supervisor.telemetry import banner
from supervisor.telemetry.child_metrics import ChildMetrics
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.exposition import SupervisorCollector
from supervisor.telemetry.facts import AnyHappening, MetricsFileSkipped, Noted, SinkFailed
from supervisor.telemetry.health import Health, longest_attempt_s, unready
from supervisor.telemetry.hub import Hub
from supervisor.telemetry.library_log import LibraryHandler
from supervisor.telemetry.log import LogSink, wants_console
from supervisor.telemetry.metrics import MetricsSink
from supervisor.telemetry.render import Exposition, Renderer
from supervisor.telemetry.sampler import Sample, Sampler
from supervisor.telemetry.status import Document, Identity, status_document, status_line
from supervisor.telemetry.user_sink import UserSink
from supervisor.telemetry.writer import LineWriter

_TICK_S: Final = 1.0
_SNAPSHOT_SHARE: Final = 20  # snapshots take at most one twentieth of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """What is configurable. `metrics_base`: a private folder for the files of children's metrics; None: none.

    `acquire_s` and `connect_s`: what the database side waits for a session, and for the server to open one.
    """

    log_format: str = "auto"
    log_level: str = "info"
    log_fd: int = 2
    metrics_base: Path | None = None
    user_sink: str | None = None
    app_dir: str = "."
    acquire_s: float = 30.0
    connect_s: float = 10.0


class Telemetry:
    """Log, metrics, user's sink, status and health. `happened` and the rest belong to the loop's thread."""

    def __init__(self, settings: CoreSettings, options: TelemetryOptions) -> None:
        """Open the log at once, so that whatever fails next can be said."""
        self._settings = settings
        self._snapshot: Callable[[], Snapshot | None] = lambda: None
        self._heartbeat: Callable[[], float | None] = lambda: None
        self._sampler: Sampler | None = None
        self._kept: Snapshot | None = None
        self._kept_until = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._not_live: list[str] = []
        self.waits_for: str | None = None  # what the start waits for
        metrics = MetricsSink(queue.name for queue in settings.queues)
        self._writer = LineWriter(options.log_fd, on_dropped=self._dropped)
        console = wants_console(options.log_format, options.log_fd)
        self.log = LogSink(self._writer, console=console, level=options.log_level)
        self.child_metrics: ChildMetrics | None = None
        self._user: UserSink | None = None
        if options.user_sink:
            self._user = UserSink(
                options.user_sink, app_dir=options.app_dir, on_dropped=self._dropped, on_failed=self._user_failed
            )
        self.hub = Hub(metrics=metrics, log=self.log, user=self._user, on_child_gone=self._child_gone)
        self.happened: Callable[[AnyHappening], None] = self.hub.happened
        self.child_output = self.hub.child_output
        self.child_log = self.hub.child_log
        self.handed = self.hub.handed
        self.child_metrics = self._open_child_metrics(options.metrics_base)
        ours = SupervisorCollector(metrics, snapshot=self._current, counts=self._counts)
        self._renderer = Renderer(ours, self.child_metrics)
        self._health = Health(
            polling_s={queue.name: queue.polling_interval_s for queue in settings.queues},
            settle_attempts=lambda queue: metrics.of(queue).settle_attempts,
            attempt_s=longest_attempt_s(
                acquire_s=options.acquire_s,
                connect_s=options.connect_s,
                statement_s=settings.statement_timeout_s,
                permit_s=settings.permit_deadline_s,
            ),
        )
        self._library = LibraryHandler(self.log)
        self._library.install()

    # --- life -------------------------------------------------------------------------------------------------------

    def attach(
        self,
        *,
        snapshot: Callable[[], Snapshot | None],
        heartbeat: Callable[[], float | None] | None = None,
        sample: Sample | None = None,
    ) -> None:
        """Say where the state is. `heartbeat`: when the driver turned last, on `shared.clock.boottime`."""
        self._snapshot = snapshot
        self._kept = None
        if heartbeat is not None:
            self._heartbeat = heartbeat
        if sample is not None:
            self._sampler = Sampler(sample, clock=boottime)

    def start(self) -> None:
        """Begin to tick and to sample; needs the running loop. Writes the boot banner."""
        self._tasks.append(asyncio.create_task(self._tick(), name="telemetry-tick"))
        if self._sampler is not None:
            self._tasks.append(asyncio.create_task(self._sampler.run(), name="queue-sampler"))
        self.log.entry("boot", "supervisor starts", fields=banner.supervisor_fields(self._settings))
        for queue in self._settings.queues:
            self.log.entry("boot.queue", "limits in force", fields=banner.queue_fields(queue))

    async def stop_sampling(self) -> None:
        """End what uses the database, before its pool is closed."""
        await self._cancel([task for task in self._tasks if task.get_name() == "queue-sampler"])

    async def close(self) -> None:
        """Write out what is left, within a few seconds, and remove the files of metrics."""
        await self._cancel(self._tasks)
        if self._user is not None:
            await asyncio.to_thread(self._user.close)
        self.flush()
        self._library.uninstall()
        self._writer.close()
        if self.child_metrics is not None:
            self.child_metrics.close()

    def flush(self) -> None:
        """Write out log lines that were held back or wait for the descriptor; at most 2 s."""
        self.log.tick(final=True)
        self._writer.flush()

    # --- what is told -----------------------------------------------------------------------------------------------

    def note(self, topic: str, text: str, *, level: str = "info", **fields: object) -> None:
        """Log something that is no happening. `topic` is the event's name."""
        self.happened(Noted(topic, level, text, tuple(fields.items())))

    def log_status(self) -> None:
        """Log the status line (USR1)."""
        self.log.entry("status", status_line(self._current(), self.hub.metrics))

    # --- what is asked ----------------------------------------------------------------------------------------------

    def status(self) -> Document:
        """Build the status document."""
        return status_document(
            self._current(),
            identity=Identity(
                host=self._settings.host, supervisor=self._settings.supervisor, version=self._settings.version
            ),
            metrics=self.hub.metrics,
            counts=self._counts(),
            deaths=self.hub.deaths.latest(),
            not_live=self._not_live,
            at=time.time(),
        )

    async def metrics(self, *, openmetrics: bool = False) -> Exposition:
        """Return the exposition: ours and, summed over children, those that handlers define."""
        return await self._renderer.render(as_openmetrics=openmetrics)

    def metrics_now(self, *, openmetrics: bool = False) -> Exposition:
        """Return it at once, without HTTP and without a loop."""
        return self._renderer.render_now(as_openmetrics=openmetrics)

    def not_live(self) -> Sequence[str]:
        """Say why the loop makes no progress; nothing when it does."""
        self._observe()
        return self._not_live

    def not_ready(self) -> dict[str, str]:
        """Say why queues are not ready, by name ("" for the whole); nothing when all are."""
        return {"": self.waits_for} if self.waits_for else unready(self._current())

    # --- children's metrics -----------------------------------------------------------------------------------------

    @property
    def metrics_folder(self) -> str | None:
        """HELLO's `metrics_dir`."""
        return None if self.child_metrics is None else str(self.child_metrics.folder)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _current(self) -> Snapshot | None:
        """Take a snapshot, or the last one again: whoever asks in a loop gets a bounded share of the loop's time."""
        now = boottime()
        if self._kept is None or now >= self._kept_until:
            self._kept = self._snapshot()
            self._kept_until = boottime() + (boottime() - now) * _SNAPSHOT_SHARE
        return self._kept

    def _counts(self) -> dict[str, QueueCounts]:
        return {} if self._sampler is None else dict(self._sampler.latest())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.log.tick()
            self._observe()

    def _observe(self) -> None:
        snapshot = self._current()
        if snapshot is not None:
            self._not_live = self._health.observe(snapshot, heartbeat_at=self._heartbeat(), now=boottime())

    def _child_gone(self, pid: int) -> None:
        if self.child_metrics is not None:
            self.child_metrics.forget(pid)

    def _open_child_metrics(self, base: Path | None) -> ChildMetrics | None:
        if base is None:
            return None
        try:
            return ChildMetrics(base, on_skipped=self._file_skipped)
        except OSError as error:
            self.happened(SinkFailed("child_metrics", f"no folder in {base}: {error.strerror}"))
            return None

    def _dropped(self, count: int) -> None:
        self.hub.dropped(count)

    def _user_failed(self, error: str) -> None:
        self.log.happened(SinkFailed("user", error))

    def _file_skipped(self, file: str, why: str) -> None:
        self.hub.dropped(1)
        self.log.happened(MetricsFileSkipped(file, why))

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = [task for task in self._tasks if not task.done()]

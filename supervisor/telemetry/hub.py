"""The hub: one call takes a happening and hands it to every sink that wants it. No sink can hurt the caller.

core ────────┐                ┌── metrics  (integers)
shell ─facts─┤── happened() ──┼── log      (lines, through a thread)
children ────┘                ├── deaths   (ring buffer)
                              └── user     (queue, thread, process of its own)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol, get_args

from supervisor.core.happenings import ChildBecameReady, ChildEnded, ChildStarting, MessageStartedRunning
from supervisor.telemetry.catalogue import HAPPENINGS
from supervisor.telemetry.deaths import RecentDeaths
from supervisor.telemetry.facts import AnyHappening, Fact, SinkFailed
from supervisor.telemetry.log import LogSink
from supervisor.telemetry.metrics import MetricsSink

Route = Callable[..., None]


class EventSink(Protocol):
    """Takes every happening; must not block."""

    def happened(self, happening: AnyHappening) -> None:
        """Take one happening."""


class _Child:
    """What a child's output is labelled with."""

    __slots__ = ("pid", "queue", "slot")

    def __init__(self, queue: str, slot: int) -> None:
        self.queue = queue
        self.slot = slot
        self.pid: int | None = None


class Hub:
    """Fan-out. Everything but `dropped` belongs to the loop's thread."""

    def __init__(
        self,
        *,
        metrics: MetricsSink,
        log: LogSink,
        user: EventSink | None = None,
        on_child_gone: Callable[[int], None] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.metrics = metrics
        self.log = log
        self.deaths = RecentDeaths()
        self._wall = wall
        self._on_child_gone = on_child_gone
        self._children: dict[int, _Child] = {}
        self._current: dict[int, tuple[int | None, int, int | None]] = {}  # claim, msg_id, attempt
        self._failing: set[str] = set()
        self._routes: Final[dict[type, tuple[Route, ...]]] = {
            kind: tuple(self._routes_of(kind, user)) for kind in (*HAPPENINGS, *get_args(Fact))
        }

    def happened(self, happening: AnyHappening) -> None:
        """Tell the sinks. Never raises: a sink that fails is counted, and said once."""
        for route in self._routes.get(type(happening), ()):
            try:
                route(happening)
            except Exception as error:  # noqa: BLE001 - the boundary of the sinks
                self._sink_failed(route, error)

    def handed(self, child: int, claim: int, msg_id: int, attempt: int | None) -> None:
        """A message goes to a child: what it prints from now on is labelled so. Earlier than any happening says it."""
        self._current[child] = (claim, msg_id, attempt)

    def child_output(
        self,
        child: int,
        claim: int | None,
        stream: str,  # noqa: ARG002 - stdout and stderr are one pipe
        text: str,
        *,
        msg_id: int | None = None,
        attempt: int | None = None,
    ) -> None:
        """Log a line that a child printed; without `msg_id` it is labelled with the message that the child runs."""
        queue, slot, pid, msg_id, attempt = self._identify(child, claim, msg_id, attempt)
        try:
            self.log.output(text, queue=queue, slot=slot, pid=pid, msg_id=msg_id, attempt=attempt)
        except Exception as error:  # noqa: BLE001 - the boundary of the sinks
            self._sink_failed(self.log.output, error)

    def child_log(
        self,
        child: int,
        claim: int | None,
        level: str,
        text: str,
        *,
        msg_id: int | None = None,
        attempt: int | None = None,
    ) -> None:
        """Log what a handler wrote with `message.log`."""
        queue, slot, pid, msg_id, attempt = self._identify(child, claim, msg_id, attempt)
        try:
            self.log.child_log(level, text, queue=queue, slot=slot, pid=pid, msg_id=msg_id, attempt=attempt)
        except Exception as error:  # noqa: BLE001 - the boundary of the sinks
            self._sink_failed(self.log.child_log, error)

    def dropped(self, count: int) -> None:
        """Count events that a sink lost. Called from any thread: an increment may be lost, the work may not."""
        self.metrics.events_dropped += count

    def _routes_of(self, kind: type, user: EventSink | None) -> Iterable[Route]:
        """Choose the receivers of one kind; bookkeeping first, as the log's labels need it."""
        bookkeeping: dict[type, Route] = {
            ChildStarting: self._child_starting,
            ChildBecameReady: self._child_ready,
            MessageStartedRunning: self._message_started,
            ChildEnded: self._child_ended,
        }
        if kind in bookkeeping:
            yield bookkeeping[kind]
        if kind in self.metrics.routes:
            yield self.metrics.routes[kind]
        if self.log.wants(kind):
            yield self.log.happened
        if user is not None:
            yield user.happened

    def _child_starting(self, happening: ChildStarting) -> None:
        self._children[happening.child] = _Child(happening.queue, happening.slot)

    def _child_ready(self, happening: ChildBecameReady) -> None:
        child = self._children.setdefault(happening.child, _Child(happening.queue, happening.slot))
        child.pid = happening.pid

    def _message_started(self, happening: MessageStartedRunning) -> None:
        known = self._current.get(happening.child)
        if known is not None and known[1] == happening.msg_id and known[2] == happening.attempt:
            return  # said when it was handed over
        claim = known[0] if known is not None and known[1] == happening.msg_id else None
        self._current[happening.child] = (claim, happening.msg_id, happening.attempt)

    def _child_ended(self, happening: ChildEnded) -> None:
        self._children.pop(happening.child, None)
        self._current.pop(happening.child, None)
        self.deaths.add(happening, at=self._wall())
        if self._on_child_gone is not None:
            self._on_child_gone(happening.pid)

    def _identify(
        self, child: int, claim: int | None, msg_id: int | None, attempt: int | None
    ) -> tuple[str, int, int | None, int | None, int | None]:
        """Name queue, slot, pid, message and attempt of a child's line."""
        known = self._children.get(child)
        queue, slot, pid = (known.queue, known.slot, known.pid) if known else ("", -1, None)
        running = self._current.get(child)
        if claim is not None and msg_id is None and running is not None and running[0] in (None, claim):
            _, msg_id, attempt = running
        return queue, slot, pid, msg_id, attempt

    def _sink_failed(self, route: Route, error: Exception) -> None:
        """Count, and say the first failure of each sink; a sink that is the log itself may fail at that too."""
        self.metrics.events_dropped += 1
        name = getattr(route, "__qualname__", type(route).__name__)
        if name in self._failing:
            return
        self._failing.add(name)
        try:
            self.log.happened(SinkFailed(name, f"{type(error).__name__}: {error}"))
        except Exception:  # noqa: BLE001 - the log is what fails
            self.metrics.events_dropped += 1

"""Rendering of the exposition: once for all who ask at a time, off the loop, for a bounded share of time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = openmetrics.CONTENT_TYPE_LATEST
_SHARE: Final = 100  # rendering takes at most one hundredth of the time ...
_MAX_AGE_S: Final = 5.0  # ... but an answer is never older than this


class Exposition(NamedTuple):
    """A body and its content type."""

    body: bytes
    content_type: str


class _Fixed(Collector):
    """Families that were collected before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class Renderer:
    """Ours are collected on the loop's thread, those of children and the text are made on another."""

    def __init__(
        self, ours: Collector, theirs: Collector | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`theirs`: metrics of handlers; when they fail, ours are served alone."""
        self._ours = ours
        self._theirs = theirs
        self._clock = clock
        self._fresh: dict[bool, tuple[float, Exposition]] = {}
        self._running: dict[bool, asyncio.Task[Exposition]] = {}

    async def render(self, *, as_openmetrics: bool) -> Exposition:
        """Return the text of this moment, or of a moment ago when many ask."""
        fresh = self._fresh.get(as_openmetrics)
        if fresh is not None and self._clock() < fresh[0]:
            return fresh[1]
        task = self._running.get(as_openmetrics)
        if task is None:
            task = asyncio.create_task(self._render(as_openmetrics), name="render-metrics")
            self._running[as_openmetrics] = task
            task.add_done_callback(lambda _: self._running.pop(as_openmetrics, None))
        return await asyncio.shield(task)

    def render_now(self, *, as_openmetrics: bool) -> Exposition:
        """Return the text of this moment, on this thread."""
        return self._text(list(self._ours.collect()), as_openmetrics)

    async def _render(self, as_openmetrics: bool) -> Exposition:
        started = self._clock()
        ours = list(self._ours.collect())
        rendered = await asyncio.to_thread(self._text, ours, as_openmetrics)
        now = self._clock()
        self._fresh[as_openmetrics] = (now + min((now - started) * _SHARE, _MAX_AGE_S), rendered)
        return rendered

    def _text(self, ours: list[Metric], as_openmetrics: bool) -> Exposition:
        theirs: list[Metric] = []
        if self._theirs is not None:
            try:
                theirs = list(self._theirs.collect())
                return _exposition([*ours, *theirs], as_openmetrics)
            except Exception:  # noqa: BLE001 - a handler can name and label its metrics as it likes
                theirs = []
        return _exposition([*ours, *theirs], as_openmetrics)


def _exposition(metrics: list[Metric], as_openmetrics: bool) -> Exposition:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(metrics))
    if as_openmetrics:
        write: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest
        return Exposition(write(registry), OPENMETRICS_TYPE)
    return Exposition(generate_latest(registry), TEXT_TYPE)

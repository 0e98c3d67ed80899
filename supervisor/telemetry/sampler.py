"""Depth and age of the queues, asked from the database at a bounded rate, whoever looks at them how often."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from supervisor.telemetry.counts import QueueCounts

EVERY_S: Final = 10.0
_TIMEOUT_S: Final = 8.0
_SHARE: Final = 20  # a sample that takes long is taken less often: at most this part of the time

Sample = Callable[[], Awaitable[Mapping[str, QueueCounts]]]


class Sampler:
    """Keeps the last sample, and forgets it when it is old."""

    def __init__(self, sample: Sample, *, clock: Callable[[], float], every_s: float = EVERY_S) -> None:
        """`sample` returns what it could measure, by queue; it may fail or hang."""
        self._sample = sample
        self._clock = clock
        self._every_s = every_s
        self._counts: dict[str, QueueCounts] = {}
        self._at = float("-inf")
        self.error: str | None = None

    def latest(self) -> Mapping[str, QueueCounts]:
        """Return the last sample, nothing when it is too old to be shown."""
        return self._counts if self._clock() - self._at < 4 * self._every_s else {}

    async def run(self) -> None:
        """Sample for ever. Cancel it to end."""
        while True:
            took_s = await self.sample_once()
            await asyncio.sleep(max(self._every_s, took_s * _SHARE))

    async def sample_once(self) -> float:
        """Take one sample; returns how long it took. A failure leaves the last one, which grows old."""
        started = self._clock()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._counts = dict(await self._sample())
        except Exception as error:  # noqa: BLE001 - the database may fail in any way; the gauges just end
            self.error = f"{type(error).__name__}: {error}"
        else:
            self._at = self._clock()
            self.error = None
        return self._clock() - started

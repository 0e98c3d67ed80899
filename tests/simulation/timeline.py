"""Virtual time: things that will happen, in order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Actions run one after the other, each at its moment; equal moments keep the order in which they were planned."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Plan an action; a moment that has passed means now."""
        self._count += 1
        heappush(self._heap, (max(self.now, when), self._count, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Plan an action `delay_s` from now."""
        self.at(self.now + delay_s, action, *args)

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Let things happen until `done()` (True) or until the moment `until` (False)."""
        heap = self._heap
        while not done():
            if not heap or heap[0][0] > until:
                self.now = max(self.now, until)
                return done()
            when, _, action, args = heappop(heap)
            self.now = when
            action(*args)
        return True

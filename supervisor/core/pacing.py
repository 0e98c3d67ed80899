"""How much to hold ahead of the children: about 50 ms of work each, by measured handler time."""

from __future__ import annotations

from math import ceil
from typing import Final

_WEIGHT: Final = 0.05
_AUTO_MAX_IN_FLIGHT: Final = 1000


class Pacing:
    """An estimate of the time that one message keeps a child, and what follows from it."""

    __slots__ = ("_ahead_s", "_max_in_flight", "estimate_s")

    def __init__(self, ahead_s: float, max_in_flight: int | None, concurrency: int) -> None:
        self._ahead_s = ahead_s
        self._max_in_flight = max_in_flight or max(_AUTO_MAX_IN_FLIGHT, 2 * concurrency)
        self.estimate_s: float | None = None  # None: nothing measured yet, hold nothing ahead

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def measured(self, seconds: float) -> None:
        """A message kept a child for so long, dispatch to result."""
        before = self.estimate_s
        if before is None or seconds > 4 * before:
            # Slow work counts at once, fast work step by step: holding too much starves others, too little only costs.
            self.estimate_s = seconds if before is None else before + (seconds - before) / 4
        else:
            self.estimate_s = before + (seconds - before) * _WEIGHT

    def turned_slow(self, seconds: float) -> None:
        """What was held ahead had to be given back: believe in this time per message until measured otherwise."""
        self.estimate_s = max(self.estimate_s or 0.0, seconds)

    def ahead(self, children: int) -> int:
        """Messages to hold waiting for so many ready children."""
        if self.estimate_s is None or self.estimate_s >= self._ahead_s:
            return 0
        return min(self._max_in_flight, ceil(children * self._ahead_s / max(self.estimate_s, 1e-5)))

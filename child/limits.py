"""A bound on how often something may happen. Pure: time is a parameter."""

from __future__ import annotations


class Allowance:
    """A bucket of `burst` that fills by `per_s`."""

    __slots__ = ("_burst", "_left", "_per_s", "_since")

    def __init__(self, *, burst: int, per_s: float, now: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._since = now

    def take(self, now: float) -> bool:
        """Whether it may happen now."""
        self._left = min(self._burst, self._left + (now - self._since) * self._per_s)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

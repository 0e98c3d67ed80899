"""Waits that grow, with jitter, up to a limit."""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    """`next_s()` gives base, 2 x base, 4 x base … up to the limit, each times U[0.5, 1]."""

    def __init__(self, *, base_s: float, limit_s: float) -> None:
        self._base_s = base_s
        self._limit_s = limit_s
        self._step = 0

    def next_s(self) -> float:
        """Give the next wait in seconds."""
        wait_s = min(self._limit_s, self._base_s * 2.0 ** min(self._step, 30))
        self._step += 1
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, protects nothing

    def reset(self) -> None:
        """Start again at the base."""
        self._step = 0

"""Token buckets that remember how much they held back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MAX_KEYS: Final = 4_096


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, so many a second."""

    burst: float
    per_s: float


class _Bucket:
    __slots__ = ("at", "suppressed", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at
        self.suppressed = 0


class RateLimiter:
    """One bucket for each key. Bounded: when there are too many keys, those that hold nothing back are forgotten."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def admit(self, key: tuple[str, str], rate: Rate, now: float) -> int | None:
        """Return None to hold back; else how many were held back since the last one that went through."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _MAX_KEYS:
                self._buckets = {k: b for k, b in self._buckets.items() if b.suppressed}
                if len(self._buckets) >= _MAX_KEYS:
                    return None
            bucket = self._buckets[key] = _Bucket(rate.burst, now)
        bucket.tokens = min(rate.burst, bucket.tokens + max(0.0, now - bucket.at) * rate.per_s)
        bucket.at = now
        if bucket.tokens < 1.0:
            bucket.suppressed += 1
            return None
        bucket.tokens -= 1.0
        suppressed, bucket.suppressed = bucket.suppressed, 0
        return suppressed

    def take_suppressed(self) -> list[tuple[str, str, int]]:
        """Return and forget what was held back so far: (event, queue, count)."""
        taken: list[tuple[str, str, int]] = []
        for (event, queue), bucket in self._buckets.items():
            if bucket.suppressed:
                taken.append((event, queue, bucket.suppressed))
                bucket.suppressed = 0
        return taken

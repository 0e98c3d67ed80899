"""When to start a process again, and when to give a queue up for a while (design 5, Boot).

Only boot failures and idle deaths count. A death with a message in hand never does: fifty poison messages must not
park a queue. Children that fall together are one failure: what they say about the handler is one thing. A kill from
outside says nothing about it: it delays the next start for a moment, and parks nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

from supervisor.core.settings import Timing

_KILL_DELAY_BASE_S: Final = 0.02
_KILL_DELAY_MAX_S: Final = 2.0


class Restarts:
    __slots__ = (
        "_failed_at",
        "_failures",
        "_kills",
        "_timing",
        "_uniform",
        "consecutive",
        "not_before",
        "park_count",
        "parked",
        "retry_at",
    )

    def __init__(self, timing: Timing, uniform: Callable[[], float]) -> None:
        self._timing = timing
        self._uniform = uniform
        self._failures: deque[float] = deque(maxlen=timing.boot_intensity)
        self._failed_at = -inf
        self._kills = 0
        self.consecutive = 0
        self.not_before = 0.0
        self.parked: str | None = None
        self.park_count = 0
        self.retry_at = 0.0

    def failed(
        self, now: float, why: str, *, spawned_at: float, definite: bool, from_outside: bool, others_ready: bool
    ) -> float:
        """A boot failure or an idle death; returns seconds until the next start is allowed.

        definite: the child itself said that its handler cannot be imported, ended or crashed before it was READY, or
        hung for the whole deadline. Parks the queue after too many in a row, or too many in the period, unless other
        children do their work.
        """
        if spawned_at <= self._failed_at:
            return max(0.0, self.not_before - now)  # it was there when the last one failed: the same failure
        self._failed_at = now
        if from_outside and self.parked is None:
            return self._killed(now)
        self.consecutive += 1
        self._failures.append(now)
        timing = self._timing
        delay = min(timing.boot_backoff_max_s, timing.boot_backoff_base_s * 2.0 ** min(self.consecutive - 1, 16))
        delay *= 0.5 + self._uniform() / 2
        self.not_before = now + delay
        too_many = len(self._failures) == timing.boot_intensity and now - self._failures[0] <= timing.boot_period_s
        if not others_ready and (too_many or (definite and self.consecutive >= timing.boot_attempts) or self.parked):
            delay = self._park(now, why)
        return delay

    def _killed(self, now: float) -> float:
        self._kills += 1
        delay = min(_KILL_DELAY_MAX_S, _KILL_DELAY_BASE_S * 2.0 ** min(self._kills - 1, 16))
        self.not_before = max(self.not_before, now + delay * (0.5 + self._uniform() / 2))
        return self.not_before - now

    def _park(self, now: float, why: str) -> float:
        self.parked = why
        self.park_count += 1
        delay = self._timing.park_retry_s * (0.75 + self._uniform() / 2)
        self.retry_at = now + delay
        self.not_before = self.retry_at
        return delay

    def succeeded(self) -> bool:
        """A child became READY. True when that ended a parking."""
        was_parked = self.parked is not None
        self.consecutive = self._kills = 0
        self.not_before = 0.0
        self.parked = None
        if was_parked:
            self._failures.clear()
        return was_parked

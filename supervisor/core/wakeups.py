"""When to read a queue. A notification is only a nudge: polling finds every row."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from supervisor.core.settings import Timing


class Wakeups:
    """`hungry` means: the queue may have something, read when there is room.

    Reads until empty; after a notification once more when PGMQ's throttle has passed, since throttling is leading-edge
    and swallows what comes right behind; after an empty read at the next visible time, since nothing notifies when a
    delay runs out; and at the latest after the polling interval, with jitter.
    """

    __slots__ = ("_again", "_interval", "_timing", "_uniform", "hungry", "poll_at", "timer_at", "trailing_at")

    def __init__(self, polling_interval_s: float, timing: Timing, uniform: Callable[[], float]) -> None:
        self._interval = polling_interval_s
        self._timing = timing
        self._uniform = uniform
        self.hungry = True
        self._again = False
        self.poll_at = inf
        self.timer_at = inf
        self.trailing_at = inf

    def notified(self, now: float, *, reading: bool) -> None:
        """`reading`: a read is under way, and may have looked before the row was there."""
        self.hungry = True
        self._again = reading
        self.trailing_at = now + self._timing.throttle_s

    def found(self, *, reading: bool = False) -> None:
        """`reading`: another read is still under way, of which the last notification may know more."""
        self.hungry = True
        self._again = self._again and reading

    def found_nothing(self, now: float, next_visible_s: float | None, *, reading: bool = False) -> None:
        self.hungry = self._again
        self._again = self._again and reading
        self.poll_at = now + self._interval * (0.8 + 0.4 * self._uniform())
        # A millisecond later than the database said: its clock is read before the row is.
        found = inf if next_visible_s is None else now + max(0.0, next_visible_s) + 0.001
        # What was expected stays: this read may have been made before the retry was committed.
        self.timer_at = min(found, self.timer_at if self.timer_at > now else inf)

    def expect(self, at: float) -> None:
        """A message of ours becomes visible again then: nothing else would tell us."""
        self.timer_at = min(self.timer_at, at + 0.001)

    def passed(self, now: float) -> str | None:
        """Which timer made the queue hungry just now, if one did."""
        if self.hungry:
            return None
        source = None
        if now >= self.timer_at:
            source = "timer"
        elif now >= self.trailing_at:
            source = "notify"
        elif now >= self.poll_at:
            source = "poll"
        if source is not None:
            self.hungry = True
        if now >= self.timer_at:
            self.timer_at = inf
        if now >= self.trailing_at:
            self.trailing_at = inf
        if now >= self.poll_at:
            self.poll_at = inf
        return source

    def next_deadline(self) -> float:
        return inf if self.hungry else min(self.timer_at, self.trailing_at, self.poll_at)

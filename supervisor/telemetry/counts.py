"""What is measured in the database for a queue, at a bounded rate; and the gauges that come from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """One sample of a queue. `visible` counts up to `visible_limit` rows, so that a long queue costs no table scan."""

    visible: int
    oldest_visible_s: float | None  # age of what waits longest, since it became visible; None: nothing is visible
    at_limit: bool = False  # there are at least `visible` messages

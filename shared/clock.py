"""The one clock of lease arithmetic: time since boot, suspended time included.

`time.monotonic` and the event loop's timers stand still while a machine is suspended; a lease does not, because
PostgreSQL's clock goes on. The wall clock may jump. So every deadline that has to do with a lease is kept on this one.
"""

from __future__ import annotations

import time

__all__ = ["boottime"]


def boottime() -> float:
    """Return seconds since boot on CLOCK_BOOTTIME (Linux)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

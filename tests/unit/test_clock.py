"""The clock of leases."""

import time

from shared.clock import boottime


def test_the_clock_counts_since_boot() -> None:
    """It is never behind the monotonic clock, which leaves suspended time out, and never goes back."""
    before = time.monotonic()
    first, second = boottime(), boottime()
    assert before <= first <= second

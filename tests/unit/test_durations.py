"""Durations and delays."""

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.durations import (
    MAX_DELAY_MS,
    format_duration,
    parse_delay_ms,
    parse_duration,
    parse_optional_duration,
)
from shared.errors import ValidationError


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("250ms", 0.25), ("30s", 30), ("5m", 300), ("2h", 7200), ("1.5h", 5400), ("30", 30), (" 5 M ", 300), (7, 7),
     (0.1, 0.1), (0, 0), (timedelta(minutes=1), 60)],
)  # fmt: skip
def test_durations_are_read(value: Any, seconds: float) -> None:
    """Every documented form gives seconds."""
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    ["", "x", "5 minutes", "-5s", "1e3", "1_000", "٣s", "none", "1h30m", -1, -0.001, math.nan, math.inf, -math.inf,
     True, None, [], {}, pytest.param(10**5000, id="huge"), timedelta(days=-1), "9" * 5000],
)  # fmt: skip
def test_what_is_no_duration_is_refused(value: Any) -> None:
    """Everything else is refused with our error, hostile sizes included."""
    with pytest.raises(ValidationError):
        parse_duration(value)
    with pytest.raises(ValidationError):
        parse_delay_ms(value)


def test_none_means_no_limit_where_that_is_allowed() -> None:
    """`"none"` is None, and only for optional durations."""
    assert parse_optional_duration("None") is None
    assert parse_optional_duration(None) is None
    assert parse_optional_duration("5s") == 5


def test_the_limits_of_a_delay_are_exact() -> None:
    """Zero and the largest delay are accepted, one millisecond more is not."""
    assert parse_delay_ms(0) == 0
    assert parse_delay_ms(f"{MAX_DELAY_MS}ms") == MAX_DELAY_MS
    with pytest.raises(ValidationError, match="longer"):
        parse_delay_ms(f"{MAX_DELAY_MS + 1}ms")


@given(st.integers(min_value=0, max_value=10**9))
def test_whole_milliseconds_survive_as_float_seconds(delay_ms: int) -> None:
    """A delay given as float seconds is not rounded to a neighbour."""
    assert parse_delay_ms(delay_ms / 1000) == delay_ms


def test_a_part_of_a_millisecond_is_rounded_up() -> None:
    """A delay is never shorter than asked for."""
    assert parse_delay_ms(0.0001) == 1
    assert parse_delay_ms(timedelta(microseconds=1001)) == 2


def test_a_value_whose_repr_raises_is_refused_like_any_other() -> None:
    """The error's text does not depend on the good will of the value."""

    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(ValidationError, match="Hostile"):
        parse_delay_ms(Hostile())  # type: ignore[arg-type] # what a handler may pass


@given(st.integers(min_value=0, max_value=10**12))
def test_what_is_written_is_read_back(total_ms: int) -> None:
    """`format_duration` writes what `parse_duration` reads, to the millisecond."""
    assert parse_delay_ms(format_duration(total_ms / 1000)) == total_ms


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "none"), (0, "0s"), (0.25, "250ms"), (1.5, "1.5s"), (90, "90s"), (300, "5m"), (7200, "2h")],
)
def test_durations_are_written_the_short_way(seconds: float | None, text: str) -> None:
    """The largest unit that gives a whole number is used."""
    assert format_duration(seconds) == text

"""Arguments of the client are checked before any SQL."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shared.errors import ValidationError
from shared.pgmq.arguments import (
    MAX_BATCH,
    checked_delay,
    checked_filter,
    checked_id,
    checked_ids,
    checked_quantity,
    checked_queue,
    checked_visibility_s,
)


def test_a_delay_is_a_duration_or_a_time() -> None:
    """Durations become milliseconds, rounded up; times pass as they are."""
    assert checked_delay("1500ms").parameters == {"delay_ms": 1500}
    assert checked_delay(0.0001).parameters == {"delay_ms": 1}
    assert checked_delay(timedelta(milliseconds=9_007_199_254_740)).delay_ms == 9_007_199_254_740
    moment = datetime(2001, 2, 3, tzinfo=UTC)
    assert checked_delay(moment).parameters == {"at": moment}


@pytest.mark.parametrize(
    "delay",
    [-1, math.nan, math.inf, "soon", None, True, 9_007_199_254.741, datetime(2030, 1, 1)],  # noqa: DTZ001
)
def test_impossible_delays_are_refused(delay: Any) -> None:
    """Failure model: delay negative or too large; and a time that does not say where."""
    with pytest.raises(ValidationError):
        checked_delay(delay)


@pytest.mark.parametrize(
    ("value", "seconds"), [(0, 0), (30, 30), ("1ms", 1), ("1500ms", 2), ("1m", 60), (2**31 - 1, 2**31 - 1)]
)
def test_visibility_is_in_whole_seconds(value: Any, seconds: int) -> None:
    """Rounded up: never shorter than asked."""
    assert checked_visibility_s(value) == seconds


@pytest.mark.parametrize("value", [-1, 2**31, "1e9"])
def test_visibility_beyond_pgmq_is_refused(value: Any) -> None:
    """PGMQ takes a 32-bit integer."""
    with pytest.raises(ValidationError):
        checked_visibility_s(value)


@pytest.mark.parametrize("value", [0, -1, MAX_BATCH + 1, 1.0, "1", True, None])
def test_quantities_are_bounded(value: Any) -> None:
    """One to a hundred thousand, integers only."""
    with pytest.raises(ValidationError):
        checked_quantity(value)
    assert checked_quantity(MAX_BATCH) == MAX_BATCH


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "1", 1.0, None, False])
def test_ids_are_64_bit_integers(value: Any) -> None:
    """Alone and in a list."""
    with pytest.raises(ValidationError):
        checked_id(value)
    with pytest.raises(ValidationError):
        checked_ids([1, value])
    assert checked_ids(iter([2**63 - 1, 1])) == [2**63 - 1, 1]


def test_batches_of_ids_are_bounded() -> None:
    """A batch that is too large is refused with a remedy."""
    with pytest.raises(ValidationError, match="split") as caught:
        checked_ids(range(MAX_BATCH + 1))
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["", "Orders", "a-b", "a b", "ü", "x" * 48, 'a"b', None])
def test_names_are_checked(name: Any) -> None:
    """As everywhere else."""
    with pytest.raises(ValidationError):
        checked_queue(name)


def test_no_filter_is_pgmqs_empty_object() -> None:
    """A filter is what the body contains."""
    assert checked_filter(None) == "{}"
    assert checked_filter({"kind": "a"}) == '{"kind":"a"}'

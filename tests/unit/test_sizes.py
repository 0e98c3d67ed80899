"""Sizes of memory."""

from typing import Any

import pytest

from shared.errors import ValidationError
from shared.sizes import format_size, parse_optional_size, parse_size


@pytest.mark.parametrize(
    ("value", "size"),
    [("512MB", 512 << 20), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("64kB", 65536), ("10", 10), ("10b", 10), (7, 7)],
)
def test_sizes_are_read(value: Any, size: int) -> None:
    """Units are powers of 1024, in any case, with or without B."""
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value",
    ["", "MB", "-1MB", "1PB", "1e9", "none", 0, -1, 1.5, True, None, pytest.param(10**5000, id="huge"), "9" * 99],
)
def test_what_is_no_size_is_refused(value: Any) -> None:
    """Everything else is refused with our error."""
    with pytest.raises(ValidationError):
        parse_size(value)


def test_none_means_no_limit_where_that_is_allowed() -> None:
    """`"none"` is None, and only for optional sizes."""
    assert parse_optional_size("none") is None
    assert parse_optional_size("1MB") == 1 << 20


def test_sizes_are_written_for_people() -> None:
    """The largest fitting unit is used."""
    assert [format_size(size) for size in (None, 900, 65536, 512 << 20, 3 << 29)] == [
        "none",
        "900B",
        "64kB",
        "512MB",
        "1.5GB",
    ]

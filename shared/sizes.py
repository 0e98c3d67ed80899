"""Sizes of memory and of payloads as people write them: "512MB", "1.5 GiB", or bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from shared.errors import ValidationError

__all__ = ["format_size", "parse_optional_size", "parse_size"]

# As in PostgreSQL's own configuration, and in what `free` and `systemd` print: a kilobyte has 1024 bytes.
_UNITS: Final[dict[str, int]] = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_PATTERN: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:([kmgt])(?:i?b)?|(b))?", re.ASCII)
_MAX_BYTES: Final = 1 << 62
_REMEDY: Final = 'write "64kB", "512MB", "2GB", or a number of bytes'


def parse_size(value: int | str) -> int:
    """Turn a size into bytes. Raises `ValidationError` for what is none, is not positive, or is absurdly large."""
    match value:
        case bool():
            raise _refusal(value, "is a truth value")
        case int():
            size = value
        case str():
            found = _PATTERN.fullmatch(value.strip().lower())
            if found is None:
                raise _refusal(value, "cannot be read")
            number, unit, _ = found.groups()
            size = int(Fraction(number) * _UNITS[unit or ""])
        case _:
            raise _refusal(value, f"is {type(value).__name__}")
    if size <= 0:
        raise _refusal(value, "is not positive")
    if size > _MAX_BYTES:
        raise _refusal(value, "is larger than any machine")
    return size


def parse_optional_size(value: int | str | None) -> int | None:
    """Turn a size into bytes, where "none" (and None) means that there is no limit."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    return parse_size(value)


def _refusal(value: object, reason: str) -> ValidationError:
    """Build the error for a value that is no size."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 1 << 200 else "<huge integer>"
    return ValidationError(f"size {text[:80]} {reason}", remedy=_REMEDY)


def format_size(size: int | None) -> str:
    """Write bytes the short way: "512MB", "1.5GB", "900B", or "none"."""
    if size is None:
        return "none"
    for unit, name in (("t", "TB"), ("g", "GB"), ("m", "MB"), ("k", "kB")):
        if size >= _UNITS[unit]:
            return f"{round(size / _UNITS[unit], 1):g}{name}"
    return f"{size}B"

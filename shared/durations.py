"""Durations as people write them ("250ms", "30s", "5m", "2h", or seconds), and delays as PGMQ takes them."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from fractions import Fraction
from typing import Final

from shared.errors import ValidationError

__all__ = [
    "MAX_DELAY_MS",
    "format_duration",
    "parse_delay_ms",
    "parse_duration",
    "parse_optional_duration",
]

# The longest delay in milliseconds that still gives an interval whose microseconds a double can carry exactly.
MAX_DELAY_MS: Final = 9_007_199_254_740

_PATTERN: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d)?", re.ASCII)
_UNIT_MS: Final[dict[str, int]] = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_REMEDY: Final = 'write "250ms", "30s", "5m", "2h", or a number of seconds'


def parse_duration(value: float | str | timedelta) -> float:
    """Turn a duration into seconds. Raises `ValidationError` for what is none, is negative or is not finite."""
    return float(_milliseconds(value, "duration") / 1000)


def parse_optional_duration(value: float | str | timedelta | None) -> float | None:
    """Turn a duration into seconds, where "none" (and None) means that there is no limit."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    return parse_duration(value)


def parse_delay_ms(value: float | str | timedelta) -> int:
    """Turn a delay (seconds, a timedelta or a duration text) into whole milliseconds, rounded up.

    Raises `ValidationError` for what is none and outside 0 ... 9,007,199,254,740 ms, so that an impossible delay never
    reaches SQL, where it would be a timestamp out of range (failure model: delay negative or too large).
    """
    return math.ceil(_milliseconds(value, "delay"))


def _milliseconds(value: object, what: str) -> Fraction:
    """Turn any accepted form into exact milliseconds, never negative."""
    match value:
        case bool():
            raise _refusal(value, what, "is a truth value")
        case int():
            result = Fraction(value) * 1000
        case float():
            if not math.isfinite(value):
                raise _refusal(value, what, "is not finite")
            # By way of the shortest text, so that 0.1 means 100 ms and rounding up does not make it 101.
            result = Fraction(repr(float(value))) * 1000
        case timedelta():
            result = Fraction(value // timedelta(microseconds=1), 1000)
        case str():
            result = _parse_text(value, what)
        case _:
            raise _refusal(value, what, f"is {type(value).__name__}")
    if result < 0:
        raise _refusal(value, what, "is negative")
    if result > MAX_DELAY_MS:
        raise _refusal(value, what, f"is longer than {MAX_DELAY_MS} ms")
    return result


def _parse_text(text: str, what: str) -> Fraction:
    """Turn a text such as "1.5h" into exact milliseconds."""
    found = _PATTERN.fullmatch(text.strip().lower())
    if found is None:
        reason = "is negative" if text.strip().startswith("-") else "cannot be read"
        raise _refusal(text, what, reason)
    number, unit = found.groups()
    return Fraction(number) * _UNIT_MS[unit or "s"]


def _refusal(value: object, what: str, reason: str) -> ValidationError:
    """Build the error for a value that is no duration."""
    return ValidationError(f"{what} {_shown(value)} {reason}", remedy=_REMEDY)


def _shown(value: object) -> str:
    """Show a value in a message: bounded, and safe when its repr is hostile or an integer has too many digits."""
    try:
        text = ascii(value)
    except Exception:  # noqa: BLE001 - the value comes from a handler; its repr may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def format_duration(seconds: float | None) -> str:
    """Write seconds the short way, so that `parse_duration` reads it back: "250ms", "1.5s", "5m", "2h", or "none"."""
    if seconds is None:
        return "none"
    total_ms = round(seconds * 1000)
    for unit in ("h", "m", "s"):
        if total_ms and total_ms % _UNIT_MS[unit] == 0:
            return f"{total_ms // _UNIT_MS[unit]}{unit}"
    if total_ms >= 1000:
        return f"{total_ms / 1000:g}s" if total_ms < 1_000_000 else f"{total_ms}ms"
    return f"{total_ms}ms" if total_ms else "0s"

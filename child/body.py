"""JSON text from PostgreSQL to Python values, without the lies of the defaults.

A number that no double can hold becomes a `decimal.Decimal` instead of infinity, and integers may have as many digits
as PostgreSQL's numeric has (131 072), which is more than Python reads by default.
"""

from __future__ import annotations

import json
import math
import sys
from decimal import Decimal
from typing import Any

from child.verdicts import InvalidMessage


def decode_json(text: bytes) -> Any:
    """Decode. Raises `InvalidMessage` for what is no JSON, no UTF-8, or nested too deeply for Python's decoder."""
    try:
        try:
            return _decoder.decode(text.decode("utf-8"))
        except json.JSONDecodeError:
            raise
        except UnicodeDecodeError:
            raise
        except ValueError:
            return _decode_with_long_integers(text.decode("utf-8"))
    except RecursionError:
        raise InvalidMessage("the body is nested too deeply to be decoded") from None
    except (ValueError, ArithmeticError) as error:
        raise InvalidMessage(f"the body cannot be decoded: {error}") from None


def _decode_with_long_integers(text: str) -> Any:
    """Decode again without the limit on digits, which guards against input from strangers, not from our database."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return _decoder.decode(text)
    finally:
        sys.set_int_max_str_digits(limit)


def _number(text: str) -> float | Decimal:
    value = float(text)
    return value if math.isfinite(value) else Decimal(text)


_decoder = json.JSONDecoder(parse_float=_number)


def encode_json(value: object) -> str:
    """Encode for jsonb, so that what `decode_json` gives goes back whole. Raises TypeError and ValueError."""
    try:
        return _encode(value)
    except ValueError:
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            return _encode(value)
        finally:
            sys.set_int_max_str_digits(limit)


def _encode(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_whole_number)


def _whole_number(value: object) -> int:
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")

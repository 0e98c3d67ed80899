"""Checks of what callers hand over: all of them before any SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from shared.durations import parse_delay_ms
from shared.errors import ValidationError
from shared.naming import validate_queue_name
from shared.pgmq.bodies import RawJson, encode_headers

__all__ = [
    "MAX_BATCH",
    "Delay",
    "Duration",
    "Filter",
    "When",
    "checked_delay",
    "checked_filter",
    "checked_id",
    "checked_ids",
    "checked_interval",
    "checked_quantity",
    "checked_queue",
    "checked_visibility_s",
]

Duration: TypeAlias = float | str | timedelta
"""Seconds, "250ms" / "30s" / "5m" / "2h", or a timedelta."""

Delay: TypeAlias = Duration | datetime
"""From now on, by the database's clock; or a point in time, with its zone."""

Filter: TypeAlias = Mapping[str, object] | RawJson
"""What a message must contain to be taken, as PGMQ's `conditional` (experimental there)."""

MAX_BATCH: Final = 100_000
_MAX_ID: Final = 2**63 - 1
_MAX_SECONDS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class When:
    """A checked delay: `at` where a point in time was given, else `delay_ms`."""

    delay_ms: int
    at: datetime | None

    @property
    def parameters(self) -> dict[str, object]:
        """The parameter that goes with the statement for this kind of delay."""
        return {"delay_ms": self.delay_ms} if self.at is None else {"at": self.at}


def checked_queue(queue: str) -> str:
    """Give the name back if it is one. Raises `ValidationError` with the reason."""
    validate_queue_name(queue)
    return queue


def checked_delay(delay: Delay) -> When:
    """Check a delay: 0 ... 9,007,199,254,740 ms, or a datetime that knows its zone. Raises `ValidationError`."""
    if not isinstance(delay, datetime):
        return When(parse_delay_ms(delay), None)
    if delay.utcoffset() is None:
        raise ValidationError(
            f"the time {delay.isoformat()} has no zone", remedy="use datetime.now(timezone.utc) and the like"
        )
    return When(0, delay)


def checked_visibility_s(value: Duration) -> int:
    """Turn a visibility timeout into PGMQ's whole seconds, rounded up. Raises `ValidationError`."""
    seconds = -(-parse_delay_ms(value) // 1000)
    if seconds > _MAX_SECONDS:
        raise ValidationError(f"visibility timeout of {seconds} s is longer than PGMQ's {_MAX_SECONDS} s")
    return seconds


def checked_quantity(value: object, what: str = "quantity") -> int:
    """Check a number of messages. Raises `ValidationError` unless it is 1 ... 100,000."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BATCH:
        raise ValidationError(f"{what} {value!r:.40} is not a number from 1 to {MAX_BATCH}")
    return value


def checked_id(value: object) -> int:
    """Check the number of a message. Raises `ValidationError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not -_MAX_ID - 1 <= value <= _MAX_ID:
        raise ValidationError(f"message id {value!r:.40} is not a 64-bit integer")
    return value


def checked_ids(values: Iterable[int]) -> list[int]:
    """Check the numbers of messages. Raises `ValidationError`."""
    ids = [checked_id(value) for value in values]
    if len(ids) > MAX_BATCH:
        raise ValidationError(f"{len(ids)} message ids are more than {MAX_BATCH}", remedy="split the batch")
    return ids


def checked_filter(where: Filter | None) -> str:
    """Write a filter as JSON text; none is PGMQ's empty object. Raises `ValidationError`."""
    return encode_headers(where) or "{}"


def checked_interval(value: object, what: str) -> str:
    """Check an interval of partitions: a positive number of messages, or text that PostgreSQL will judge."""
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
        raise ValidationError(f"{what} is neither a number of messages nor a time such as '1 day'")
    if isinstance(value, int) and value < 1:
        raise ValidationError(f"{what} {value} is not positive")
    return str(value)

"""How rows become answers: one decoding for both faces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from shared.pgmq.messages import Message, QueueInfo, QueueMetrics

__all__ = ["Rows", "first", "firsts", "infos", "measurements", "messages", "nothing"]

Rows: TypeAlias = Sequence[tuple[Any, ...]]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def nothing(_: Rows) -> None:
    """Look away: a function that returns void."""
    return


def first(rows: Rows) -> Any:
    """Give the only value."""
    return rows[0][0]


def firsts(rows: Rows) -> list[Any]:
    """Give the only column."""
    return [row[0] for row in rows]


def _time(seconds: float) -> datetime:
    """Turn seconds since the epoch into a datetime; what lies beyond the years 1 to 9999 becomes the nearest end."""
    try:
        return _EPOCH + timedelta(microseconds=round(seconds * 1_000_000))
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC) if seconds > 0 else datetime.min.replace(tzinfo=UTC)


def messages(rows: Rows) -> list[Message]:
    """Read messages."""
    return [
        Message(msg_id, read_ct, _time(enqueued), None if read is None else _time(read), _time(vt), raw, raw_headers)
        for msg_id, read_ct, enqueued, read, vt, raw, raw_headers in rows
    ]


def infos(rows: Rows) -> list[QueueInfo]:
    """Read the list of queues."""
    return [QueueInfo(name, partitioned, unlogged, _time(created)) for name, partitioned, unlogged, created in rows]


def measurements(rows: Rows) -> list[QueueMetrics]:
    """Read documents of metrics, by name: newer versions add fields."""
    return [_measurement(json.loads(row[0])) for row in rows]


def _measurement(fields: Mapping[str, Any]) -> QueueMetrics:
    return QueueMetrics(
        queue=fields["queue_name"],
        length=fields["queue_length"],
        visible_length=fields["queue_visible_length"],
        total_messages=fields["total_messages"],
        newest_age_s=fields["newest_msg_age_sec"],
        oldest_age_s=fields["oldest_msg_age_sec"],
        scraped_at=datetime.fromisoformat(fields["scrape_time"]),
        default_partition_length=fields.get("default_partition_length"),
    )

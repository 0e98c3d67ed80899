"""What the client gives back: messages, queues, metrics. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shared.pgmq.bodies import decode

__all__ = ["Message", "QueueInfo", "QueueMetrics"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message, with PGMQ's names. Times are in UTC; PostgreSQL's infinities become the ends of `datetime`.

    `raw` and `raw_headers` are JSON text, None for SQL NULL.
    """

    msg_id: int
    read_ct: int
    enqueued_at: datetime
    last_read_at: datetime | None
    vt: datetime
    raw: str | None
    raw_headers: str | None

    @property
    def body(self) -> Any:
        """The body as a Python value, parsed at each access. Raises `ProtocolError` where Python cannot read it."""
        return decode(self.raw, "body")

    @property
    def headers(self) -> Any:
        """The headers as a Python value, parsed at each access; None where there are none. Raises `ProtocolError`."""
        return decode(self.raw_headers, "headers")


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue that is there."""

    name: str
    partitioned: bool
    unlogged: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class QueueMetrics:
    """PGMQ's own counts, which read the whole table. Ages in seconds are None for an empty queue.

    `default_partition_length` is None where PGMQ does not tell it (before 1.13) or the queue has no partitions.
    """

    queue: str
    length: int
    visible_length: int
    total_messages: int
    newest_age_s: int | None
    oldest_age_s: int | None
    scraped_at: datetime
    default_partition_length: int | None

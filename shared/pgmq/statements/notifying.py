"""Notifications: PGMQ's trigger on a queue, and the row without which it stays silent.

The row stands in an unlogged table that a crash of the server empties; the trigger then updates nothing and tells
nobody, for good. So both are looked at, and the row is put back without touching the table of the queue.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from psycopg import sql

from shared.naming import notify_channel
from shared.pgmq.statements._compose import compose

__all__ = ["CHECK", "ENABLE", "LOCK_QUEUE", "NOTIFY", "REPAIR_ROW", "THROTTLE_MS", "listen", "listen_to", "notify"]

THROTTLE_MS: Final = 250
"""PGMQ's own default; what an operator has set otherwise stays."""

CHECK: Final = b"""
select to_regclass('pgmq.' || quote_ident('q_' || %(queue)s::text)) is not null,
       exists (select from pg_trigger as t
               where t.tgrelid = to_regclass('pgmq.' || quote_ident('q_' || %(queue)s::text))
                 and t.tgname = 'trigger_notify_queue_insert_listeners' and t.tgenabled in ('O', 'A')),
       exists (select from pgmq.notify_insert_throttle as n where n.queue_name = %(queue)s::text)
"""
"""Parameter: queue. Columns: queue exists, trigger stands, throttle row stands. Locks nothing."""

REPAIR_ROW: Final = b"""
insert into pgmq.notify_insert_throttle (queue_name, throttle_interval_ms)
values (%(queue)s::text, %(throttle_ms)s) on conflict do nothing
"""
"""Put the row back. Parameters: queue, throttle_ms. Locks the new row, and the queue's row in pgmq.meta for share."""

LOCK_QUEUE: Final = b"select pgmq.acquire_queue_lock(%(queue)s::text)"
"""PGMQ's own advisory lock of a queue, until the end of the transaction: one process at a time makes the trigger."""

ENABLE: Final = b"select pgmq.enable_notify_insert(%(queue)s::text, %(throttle_ms)s::integer)"
"""Make trigger and row. Parameters: queue, throttle_ms.

ACCESS EXCLUSIVE on the queue's table until the commit, as PGMQ drops the trigger first: only where it is missing, and
only under a lock_timeout.
"""

NOTIFY: Final = b"select pg_notify(%(channel)s, %(payload)s)"
"""Tell a channel. Parameters: channel, payload. Locks the server's queue of notifications at the commit."""


@lru_cache(maxsize=1024)
def listen(queue: str) -> bytes:
    """Compose LISTEN on the channel of a queue. Locks nothing."""
    return listen_to(notify_channel(queue))


def listen_to(channel: str) -> bytes:
    """Compose LISTEN on any channel."""
    return compose("listen {channel}", channel=sql.Identifier(channel))


@lru_cache(maxsize=1024)
def notify(queue: str) -> bytes:
    """Compose a nudge for all who listen on a queue."""
    return compose("select pg_notify({channel}, '')", channel=sql.Literal(notify_channel(queue)))

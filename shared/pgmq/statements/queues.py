"""Queues as a whole: make, drop, list, count, purge, send; and dead-letter queues: look, redrive, purge."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from psycopg import sql

from shared.pgmq.statements._compose import ENTRY, archived, compose, iso, live

__all__ = [
    "COUNT_COLUMNS",
    "CREATE",
    "CREATE_PARTITIONED",
    "CREATE_UNLOGGED",
    "DROP",
    "LIST",
    "SEND",
    "SEND_BATCH",
    "SET_LOCK_TIMEOUT",
    "TABLES",
    "count_archived",
    "counts",
    "dlq_ids",
    "dlq_last",
    "dlq_list",
    "dlq_purge",
    "dlq_redrive",
    "dlq_show",
    "purge_batch",
    "sample",
]

LIST: Final = b"select queue_name, is_partitioned, is_unlogged from pgmq.meta order by queue_name"
"""Every queue of the database. Locks nothing."""

TABLES: Final = b"""
select to_regclass('pgmq.' || quote_ident('q_' || %(queue)s::text)) is not null,
       to_regclass('pgmq.' || quote_ident('a_' || %(queue)s::text)) is not null
"""
"""Parameter: queue. Whether its two tables are there."""

CREATE: Final = b"select pgmq.create(%(queue)s::text)"
"""A durable queue, nothing where it stands. PGMQ's advisory lock of this queue until the commit."""

CREATE_UNLOGGED: Final = b"select pgmq.create_unlogged(%(queue)s::text)"
"""An unlogged queue. As CREATE."""

CREATE_PARTITIONED: Final = b"select pgmq.create_partitioned(%(queue)s::text)"
"""A partitioned queue, with PGMQ's defaults; needs pg_partman. As CREATE."""

SET_LOCK_TIMEOUT: Final = b"select set_config('lock_timeout', %(timeout_ms)s::text, true)"
"""Bound the waits of this transaction for locks. Parameter: timeout_ms (as text)."""

DROP: Final = b"select pgmq.drop_queue(%(queue)s::text)"
"""Parameter: queue. ACCESS EXCLUSIVE on both tables: only under a lock_timeout."""

SEND: Final = b"""
select sent from pgmq.send(%(queue)s::text, %(body)s::text::jsonb, %(headers)s::text::jsonb,
                           clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond') as sent
"""
"""Send one message; body and headers are JSON text (headers may be NULL).

Locks the queue's throttle row, where it notifies, until the commit: in a transaction of others, send last.
"""

SEND_BATCH: Final = b"""
select sent from pgmq.send_batch(%(queue)s::text, %(bodies)s::text[]::jsonb[], %(headers)s::text[]::jsonb[],
                                 clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond') as sent
"""
"""Send many; arrays of JSON text, headers may be NULL as a whole. Locks as SEND."""

COUNT_COLUMNS: Final = ("visible", "in_flight", "delayed", "oldest_visible_s")


@lru_cache(maxsize=1024)
def counts(queue: str) -> bytes:
    """Compose the counts of a queue: visible, in flight, delayed, age of the oldest visible one in seconds or NULL.

    In flight is what was read and is not visible; a message that waits for its next attempt looks the same. The age
    counts from the moment when the message became visible, which the index knows. Counts read every row they count:
    sample slowly. Locks nothing.
    """
    return compose(
        """
        select (select count(*) from {q} as m where m.vt <= now()),
               coalesce(hidden.read, 0), coalesce(hidden.unread, 0),
               (select extract(epoch from now() - m.vt)::float8 from {q} as m
                where m.vt <= now() and m.vt > '-infinity' order by m.vt limit 1)
        from (select count(*) filter (where m.read_ct > 0) as read, count(*) filter (where m.read_ct = 0) as unread
              from {q} as m where m.vt > now()) as hidden
        """,
        q=live(queue),
    )


@lru_cache(maxsize=1024)
def sample(queue: str) -> bytes:
    """Compose a bounded look at a queue: visible messages, up to `limit`, and the age of the oldest one in seconds.

    Parameter: limit. Both go along the index on vt. Locks nothing.
    """
    return compose(
        """
        select (select count(*) from (select from {q} as m where m.vt <= now() limit %(limit)s) as shown),
               (select extract(epoch from now() - m.vt)::float8 from {q} as m
                where m.vt <= now() and m.vt > '-infinity' order by m.vt limit 1)
        """,
        q=live(queue),
    )


@lru_cache(maxsize=1024)
def count_archived(queue: str) -> bytes:
    """Compose the count of a queue's archive. Reads all of it; locks nothing."""
    return compose("select count(*) from {a}", a=archived(queue))


@lru_cache(maxsize=64)
def purge_batch(queue: str) -> bytes:
    """Compose one step of a purge: delete up to `limit` messages that are not in flight; rows tell how many went.

    Locks these rows until the commit and skips locked ones: unlike TRUNCATE, nobody waits.
    """
    return compose(
        """
        with doomed as materialized (
            select m.tableoid as part, m.ctid as place
            from {q} as m
            where m.vt <= now() or m.read_ct = 0
            limit %(limit)s
            for update of m skip locked
        ), done as (
            delete from {q} as m using doomed as d where m.ctid = d.place and m.tableoid = d.part returning 1
        )
        select count(*) from done
        """,
        q=live(queue),
    )


# --- dead letters -----------------------------------------------------------------------------------------------------

# Ours, and of this source: several queues may share a dead-letter queue, and anybody may send anything into it.
_OURS: Final = sql.SQL(
    "jsonb_typeof(m.message) = 'object' and m.message ? 'version' and m.message ? 'message'"
    " and (m.message -> 'source' -> 'queue') = to_jsonb(%(source)s::text)"
)

_REASON: Final = sql.SQL("(%(reason)s::text is null or m.message ->> 'reason' = %(reason)s::text)")


@lru_cache(maxsize=64)
def dlq_list(queue: str) -> bytes:
    """Compose the list of dead letters of a source, oldest first. Parameters: source, reason (or NULL), after, limit.

    Columns: msg_id, reason, source msg_id, attempt, deaths, error type, error message (cut), cause of death,
    dead_lettered_at; all but the first are text. Locks nothing.
    """
    return compose(
        """
        select m.msg_id, m.message ->> 'reason', m.message -> 'source' ->> 'msg_id',
               m.message -> 'source' ->> 'attempt', m.message -> 'source' ->> 'deaths',
               m.message -> 'error' ->> 'type', left(m.message -> 'error' ->> 'message', 500),
               m.message -> 'death' ->> 'cause', coalesce(m.message ->> 'dead_lettered_at', {enqueued_at})
        from {q} as m
        where {ours} and {reason} and m.msg_id > %(after)s
        order by m.msg_id
        limit %(limit)s
        """,
        q=live(queue),
        ours=_OURS,
        reason=_REASON,
        enqueued_at=iso("m.enqueued_at"),
    )


@lru_cache(maxsize=64)
def dlq_last(queue: str) -> bytes:
    """Compose the highest number in a dead-letter queue, or NULL: what comes later is not of this redrive."""
    return compose("select max(m.msg_id) from {q} as m", q=live(queue))


@lru_cache(maxsize=64)
def dlq_show(queue: str) -> bytes:
    """Compose the whole document of one dead letter, as JSON text. Parameter: msg_id. Locks nothing."""
    return compose("select m.message::text from {q} as m where m.msg_id = %(msg_id)s", q=live(queue))


@lru_cache(maxsize=64)
def dlq_ids(queue: str) -> bytes:
    """Compose the numbers of the dead letters of a source, in order.

    Parameters: source, reason (or NULL), after and upto (numbers), limit. Locks nothing.
    """
    return compose(
        """
        select m.msg_id
        from {q} as m
        where {ours} and {reason} and m.msg_id > %(after)s and m.msg_id <= %(upto)s
        order by m.msg_id
        limit %(limit)s
        """,
        q=live(queue),
        ours=_OURS,
        reason=_REASON,
    )


@lru_cache(maxsize=64)
def dlq_redrive(queue: str) -> bytes:
    """Compose the way back. Parameters: source, ids. Rows: (dead letter's number, new number in the source).

    Message and headers as they were; our entry does not come along. What is locked, in flight, gone or not a dead
    letter of this source stays. Locks the rows until the commit, and the source's throttle row.
    """
    return compose(
        """
        with held as materialized (
            select m.tableoid as part, m.ctid as place
            from {q} as m
            where m.msg_id = any(%(ids)s::bigint[]) and m.vt <= now() and {ours}
            for update of m skip locked
        ), d as (
            delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part
            returning m.msg_id, m.message -> 'message' as message, nullif(m.message -> 'headers', 'null') as headers
        )
        select d.msg_id, sent
        from d
        cross join lateral pgmq.send(
            %(source)s::text, d.message,
            case when jsonb_typeof(d.headers) = 'object' then d.headers - {entry} else d.headers end,
            clock_timestamp()) as sent
        """,
        q=live(queue),
        ours=_OURS,
        entry=ENTRY,
    )


@lru_cache(maxsize=64)
def dlq_purge(queue: str) -> bytes:
    """Compose the deletion of dead letters of a source. Parameters: source, ids. Rows: their numbers.

    Locks the rows until the commit; skips locked ones.
    """
    return compose(
        """
        with held as materialized (
            select m.tableoid as part, m.ctid as place
            from {q} as m
            where m.msg_id = any(%(ids)s::bigint[]) and {ours}
            for update of m skip locked
        )
        delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part returning m.msg_id
        """,
        q=live(queue),
        ours=_OURS,
    )

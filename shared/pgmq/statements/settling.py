"""Leases and settlements of the regular mode. The guard comes first: lock the rows whose fence matches, then act.

Every statement takes fences as arrays `ids`, `cts`, `ats` and answers with the ordinals (from 1) that it served. Rows
locked by somebody else are skipped, never waited for; `still_ours` tells them from those that are gone. All of a
statement happens or nothing does.
"""

from __future__ import annotations

from functools import lru_cache

from psycopg import sql

from shared.naming import notify_channel
from shared.pgmq.statements._compose import (
    END_FENCE,
    FENCE,
    WANTED,
    compose,
    dead_letter_document,
    headers_with_accounts,
    kept_in_archive,
    live,
    piece,
)

__all__ = ["ack_archive", "ack_delete", "dead_letter", "release", "renew", "retry", "still_ours"]

# All but releases need a lease that has not run out.
_LEASE = sql.SQL(" and m.vt > clock_timestamp()")


def _held(queue: str, *, with_lease: bool = True) -> sql.Composed:
    """Compose the guard: places of the rows that are ours, locked until the end of the transaction.

    Lateral, so that each is looked up by its number whatever the planner believes of the table: an acknowledgement is
    prepared, perhaps while the queue was empty. A row that changes between the look and the lock is looked at again.
    """
    return piece(
        "held as materialized (select t.part, t.place, w.n from {wanted} cross join lateral ("
        "select m.tableoid as part, m.ctid as place from {q} as m where {fence}{lease} for update of m skip locked"
        ") as t)",
        wanted=WANTED,
        q=live(queue),
        fence=FENCE,
        lease=_LEASE if with_lease else sql.SQL(""),
    )


@lru_cache(maxsize=1024)
def renew(queue: str) -> bytes:
    """Compose the renewal. More parameter: lease_ms. Rows: (n, new lease in seconds); -1 where the row is busy.

    Busy: the fence and the lease stand, and somebody else holds the row's lock; ask again. No row: lost.
    Locks the renewed rows until the commit.
    """
    return compose(
        """
        with {held}, done as (
            update {q} as m
            set vt = clock_timestamp() + %(lease_ms)s::bigint * interval '1 millisecond'
            from held as h
            where m.ctid = h.place and m.tableoid = h.part
            returning h.n, extract(epoch from m.vt - clock_timestamp())::float8 as lease_s
        )
        select n, lease_s from done
        union all
        select w.n, -1 from {wanted} join {q} as m on {fence}{lease}
        where w.n not in (select n from done)
        """,
        held=_held(queue),
        q=live(queue),
        wanted=WANTED,
        fence=FENCE,
        lease=_LEASE,
    )


@lru_cache(maxsize=1024)
def still_ours(queue: str) -> bytes:
    """Compose the question which of the fences that a settlement skipped still match: their rows are locked.

    More parameter: needs_lease; a row whose lease ran out is not ours any more then. Locks nothing.
    """
    return compose(
        "select w.n from {wanted} join {q} as m on {fence} where m.vt > clock_timestamp() or not %(needs_lease)s",
        wanted=WANTED,
        q=live(queue),
        fence=FENCE,
    )


@lru_cache(maxsize=1024)
def ack_delete(queue: str) -> bytes:
    """Compose the acknowledgement that deletes. Locks the rows until the commit."""
    return compose(
        """
        with {held}, done as (
            delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part returning h.n
        )
        select n from done
        """,
        held=_held(queue),
        q=live(queue),
    )


@lru_cache(maxsize=1024)
def ack_archive(queue: str) -> bytes:
    """Compose the acknowledgement that archives. Locks the rows until the commit."""
    return compose(
        """
        with {held}, done as (
            delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part
            returning h.n, m.msg_id, m.vt, m.read_ct, m.enqueued_at, m.last_read_at, m.message, m.headers
        ), {kept}
        select n from done
        """,
        held=_held(queue),
        q=live(queue),
        kept=kept_in_archive(queue),
    )


@lru_cache(maxsize=1024)
def retry(queue: str) -> bytes:
    """Compose the retry. More parameters: delays (ms), accounts (JSON text or NULL), arrays of the same length.

    Absolute values, and the fence ends: a repetition matches nothing. Locks the rows until the commit.
    """
    return compose(
        "with {held}, {done} select n from done",
        held=_held(queue),
        done=_keep(queue),
    )


@lru_cache(maxsize=1024)
def release(queue: str) -> bytes:
    """Compose the release: like a retry, but the fence is enough, as nobody can have claimed since.

    It also notifies the queue's channel, because an update fires no trigger; at most one row without an ordinal says
    so. Locks the rows until the commit, and with the notification, briefly, the server's queue of notifications.
    """
    return compose(
        """
        with {held}, {done}
        select n from done
        union all
        (select null from (select pg_notify({channel}, '') from done limit 1) as told)
        """,
        held=_held(queue, with_lease=False),
        done=_keep(queue),
        channel=sql.Literal(notify_channel(queue)),
    )


def _keep(queue: str) -> sql.Composed:
    """Compose the update of a settlement that keeps its rows."""
    return piece(
        """done as (
            update {q} as m
            set vt = clock_timestamp() + s.delay_ms * interval '1 millisecond',
                last_read_at = {end_fence},
                headers = {headers}
            from held as h
            join unnest(%(delays)s::bigint[], %(accounts)s::text[]) with ordinality as s(delay_ms, accounts, n)
              on s.n = h.n
            where m.ctid = h.place and m.tableoid = h.part
            returning h.n
        )""",
        q=live(queue),
        end_fence=END_FENCE,
        headers=headers_with_accounts(queue, "s.accounts"),
    )


@lru_cache(maxsize=1024)
def dead_letter(queue: str) -> bytes:
    """Compose the move into a dead-letter queue. More parameters: target (its name), envelopes (array of JSON text).

    The document is made from the row inside the database, sent, and the source deleted, all or nothing. Locks the
    rows until the commit.
    """
    return compose(
        """
        with {held}, done as (
            delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part
            returning h.n, m.msg_id, m.enqueued_at, m.message, m.headers
        )
        select d.n
        from done as d
        join unnest(%(envelopes)s::text[]) with ordinality as s(envelope, n) on s.n = d.n
        cross join lateral pgmq.send(%(target)s::text, {document}) as sent
        """,
        held=_held(queue),
        q=live(queue),
        document=dead_letter_document(queue, "s.envelope"),
    )

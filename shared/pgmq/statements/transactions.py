"""The transactional mode: what the child says inside its transaction, and what the parent settles after its end."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from psycopg import sql

from shared.pgmq.statements._compose import (
    accounts_of,
    compose,
    dead_letter_document,
    headers_with_accounts,
    kept_in_archive,
    live,
    micros,
    piece,
)
from shared.pgmq.statements.sessions import SESSION_START

__all__ = [
    "IS_AT_WORK",
    "TERMINATE_BACKEND",
    "XACT_STATUS",
    "claim_one",
    "claimed_body",
    "reckon_dead_letter",
    "reckon_retry",
    "tx_ack_archive",
    "tx_ack_delete",
    "tx_dead_letter",
    "tx_postpone",
    "tx_retry",
]

# A last_read_at that only the settlement of this one claim writes, so that it can be told from every other: repeated
# after a lost answer, it is found done. Later than the old one, whatever the clock does: no fence matches again.
_CHARGED: Final = sql.SQL(
    "greatest(timestamptz 'epoch' + (%(read_us)s::bigint + 1) * interval '1 microsecond',"
    " m.last_read_at + interval '1 microsecond')"
)


# Whether the transaction that had the row last did not commit: its number says so. It ended before ours got the row, so
# it is older, or but a little younger; of one too old to be known nothing is wanted. No number makes it raise.
_TOUCHED: Final = sql.SQL(
    "case when d.holder <> '0'::xid then ("
    "select case when w.age < 2147483648"
    " then coalesce(pg_xact_status(greatest(w.own - w.age, 3)::text::xid8) = 'aborted', false) else true end"
    " from (select o.own, (o.own - d.holder::text::bigint) & 4294967295 as age"
    " from (select pg_current_xact_id_if_assigned()::text::bigint as own) as o) as w) else false end"
)


@lru_cache(maxsize=64)
def claim_one(queue: str, *, pooled: bool) -> bytes:
    """Compose the claim of one message inside the child's transaction. No row: nothing visible.

    Parameters: lease_ms; limit_ms, as text: how long a statement and an idle transaction may last from here on.
    Columns: msg_id, read_ct, read_us, enqueued_us, visible_us, accounts, place (ctid as text), xid, backend_pid,
    backend_start_us, which only a transaction pooler makes worth asking for each time (else NULL), and touched:
    whether the transaction that claimed or locked the row last did not commit. The rest only sets something
    until the end of the transaction, a note for `claimed_body` among it.

    The row's lock is the lease. vt moves all the same: it counts when the handler commits by hand, and a row that
    stayed in its place in the index would be found dead by every later claim. An empty claim takes no transaction
    number. Locks the row until the end of the transaction.
    """
    return compose(
        """
        with due as materialized (
            select m.tableoid as part, m.ctid as place, m.vt, m.xmax as holder
            from {q} as m
            where m.vt <= now()
            order by m.vt
            limit 1
            for update of m skip locked
        )
        update {q} as m
        set read_ct = least(m.read_ct, 2147483646) + 1,
            last_read_at = clock_timestamp(),
            vt = clock_timestamp() + %(lease_ms)s::bigint * interval '1 millisecond'
        from due as d
        where m.ctid = d.place and m.tableoid = d.part
        returning m.msg_id, m.read_ct, {read_us}, {enqueued_us}, {visible_us}, {accounts}, m.ctid::text,
                  pg_current_xact_id_if_assigned()::text::bigint, pg_backend_pid(), {start_us}, {touched},
                  set_config('pgmq_supervisor.claimed', m.msg_id::text, true),
                  set_config('statement_timeout', %(limit_ms)s::text, true),
                  set_config('idle_in_transaction_session_timeout', %(limit_ms)s::text, true)
        """,
        q=live(queue),
        read_us=micros("m.last_read_at"),
        enqueued_us=micros("m.enqueued_at"),
        visible_us=micros("d.vt"),
        accounts=accounts_of("m.headers"),
        start_us=piece("({start})", start=SESSION_START) if pooled else sql.NULL,
        touched=_TOUCHED,
    )


@lru_cache(maxsize=64)
def claimed_body(queue: str, seqscan: str | None = None) -> bytes:
    """Compose the load of what `claim_one` of the same transaction claimed: (headers, body) as text; no parameters.

    It finds the number in a setting that ends with the transaction, so that both go in one message. `seqscan` is what
    `enable_seqscan` shall be from here on, in this transaction (see `sessions.INDEXES_ONLY`). Locks nothing.
    """
    return compose(
        """
        select m.headers::text, m.message::text{restore}
        from {q} as m
        where m.msg_id = nullif(current_setting('pgmq_supervisor.claimed', true), '')::bigint
        """,
        q=live(queue),
        restore=sql.SQL("")
        if seqscan is None
        else piece(", set_config('enable_seqscan', {value}, true)", value=sql.Literal(seqscan)),
    )


# The row of the statements below is locked by this very transaction. Each must match exactly one row, which their
# caller checks: then this is the transaction of the claim, and nobody but the claim has touched the row in it.
_CLAIMED: Final = sql.SQL(
    "m.ctid = %(place)s::tid and m.msg_id = %(msg_id)s"
    " and pg_current_xact_id_if_assigned()::text::bigint = %(xid)s::bigint"
)


@lru_cache(maxsize=64)
def tx_ack_delete(queue: str) -> bytes:
    """Compose the delete of the message claimed here. Parameters: place, msg_id, xid. One row comes back."""
    return compose("delete from {q} as m where {claimed} returning m.msg_id", q=live(queue), claimed=_CLAIMED)


@lru_cache(maxsize=64)
def tx_ack_archive(queue: str) -> bytes:
    """Compose the archiving of the message claimed here. Parameters: place, msg_id, xid. One row comes back."""
    return compose(
        """
        with done as (
            delete from {q} as m where {claimed}
            returning m.msg_id, m.vt, m.read_ct, m.enqueued_at, m.last_read_at, m.message, m.headers
        ), {kept}
        select msg_id from done
        """,
        q=live(queue),
        kept=kept_in_archive(queue),
        claimed=_CLAIMED,
    )


@lru_cache(maxsize=64)
def tx_retry(queue: str) -> bytes:
    """Compose the retry of the message claimed here.

    Parameters: place, msg_id, xid, delay_ms, accounts (JSON text or NULL), read_us (of the claim), set_read_ct
    (absolute, or NULL to leave it). One row comes back.
    """
    return compose(
        """
        update {q} as m
        set vt = clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond',
            read_ct = coalesce(%(set_read_ct)s::integer, m.read_ct),
            last_read_at = {charged},
            headers = {headers}
        where {claimed}
        returning m.msg_id
        """,
        q=live(queue),
        charged=_CHARGED,
        headers=headers_with_accounts(queue, "%(accounts)s::text"),
        claimed=_CLAIMED,
    )


@lru_cache(maxsize=64)
def tx_postpone(queue: str) -> bytes:
    """Compose the pause of a message whose claim was rolled back just now. Parameters: msg_id, before, delay_ms.

    Only vt moves, so that whoever has to charge an earlier attempt still finds its row; and a committed change stands
    there, so that the next claim does not find it touched. Somebody who has the row by now decides himself: it is
    skipped. Locks it until the commit.
    """
    return compose(
        """
        with held as materialized (
            select m.tableoid as part, m.ctid as place from {q} as m
            where m.msg_id = %(msg_id)s and m.read_ct = %(before)s and m.vt <= clock_timestamp()
            for update of m skip locked
        )
        update {q} as m
        set vt = clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond'
        from held as h
        where m.ctid = h.place and m.tableoid = h.part
        """,
        q=live(queue),
    )


@lru_cache(maxsize=64)
def tx_dead_letter(queue: str) -> bytes:
    """Compose the move of the message claimed here. Parameters: place, msg_id, xid, target, envelope (JSON text).

    One row comes back.
    """
    return compose(
        """
        with d as (
            delete from {q} as m where {claimed}
            returning m.msg_id, m.enqueued_at, m.message, m.headers
        )
        select sent from d cross join lateral pgmq.send(%(target)s::text, {document}) as sent
        """,
        q=live(queue),
        document=dead_letter_document(queue, "%(envelope)s::text"),
        claimed=_CLAIMED,
    )


# --- the parent, after an attempt whose commit it did not hear of -----------------------------------------------------
#
# Columns of both: number of rows served, and read_ct and last_read_at (microseconds) as this statement saw them, NULL
# where there is no row. Lock the row until the commit; a row locked by somebody else is skipped, not waited for.

# Rolled back: read_ct is the one from before the claim. Committed by the handler's own hand: it is the claim's, and so
# is last_read_at, which nobody else has.
_UNSETTLED: Final = sql.SQL(
    "m.msg_id = %(msg_id)s and (m.read_ct = %(before)s or (m.read_ct = %(before)s + 1"
    " and m.last_read_at = timestamptz 'epoch' + %(read_us)s::bigint * interval '1 microsecond'))"
)


def _held(queue: str) -> sql.Composed:
    """Compose the guard: the place of the row, not settled since the attempt, locked until the commit."""
    return piece(
        "held as materialized (select m.tableoid as part, m.ctid as place from {q} as m"
        " where {unsettled} for update of m skip locked)",
        q=live(queue),
        unsettled=_UNSETTLED,
    )


@lru_cache(maxsize=64)
def reckon_retry(queue: str) -> bytes:
    """Compose the charge of an attempt that ended without a settlement.

    Parameters: msg_id, before and after (read_ct before the claim, and as it will be), read_us (of the claim),
    delay_ms, accounts. What it writes as last_read_at tells later that it was this very charge.
    """
    return compose(
        """
        with {held}, done as (
            update {q} as m
            set vt = clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond',
                read_ct = %(after)s,
                last_read_at = {charged},
                headers = {headers}
            from held as h
            where m.ctid = h.place and m.tableoid = h.part
            returning m.msg_id
        )
        select (select count(*) from done), m.read_ct, {read_us}
        from (values (%(msg_id)s::bigint)) as w(msg_id) left join {q} as m using (msg_id)
        """,
        q=live(queue),
        held=_held(queue),
        charged=_CHARGED,
        headers=headers_with_accounts(queue, "%(accounts)s::text"),
        read_us=micros("m.last_read_at"),
    )


@lru_cache(maxsize=64)
def reckon_dead_letter(queue: str) -> bytes:
    """Compose the move after the last attempt. Parameters: msg_id, before, read_us, target, envelope."""
    return compose(
        """
        with {held}, done as (
            delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part
            returning m.msg_id, m.enqueued_at, m.message, m.headers
        ), moved as (
            select sent from done as d cross join lateral pgmq.send(%(target)s::text, {document}) as sent
        )
        select (select count(*) from moved), m.read_ct, {read_us}
        from (values (%(msg_id)s::bigint)) as w(msg_id) left join {q} as m using (msg_id)
        """,
        q=live(queue),
        held=_held(queue),
        document=dead_letter_document(queue, "%(envelope)s::text"),
        read_us=micros("m.last_read_at"),
    )


IS_AT_WORK: Final = b"""
select exists (
    select from pg_stat_get_activity(%(pid)s) as a
    where a.backend_start = timestamptz 'epoch' + %(start_us)s::bigint * interval '1 microsecond'
      and a.backend_xid::text::bigint = %(xid)s::bigint & 4294967295
)
"""
"""Whether a session still is in that transaction. Parameters: pid, start_us, xid. Locks nothing."""

TERMINATE_BACKEND: Final = b"""
select pg_terminate_backend(a.pid)
from pg_stat_activity as a
where a.pid = %(pid)s
  and a.backend_start = timestamptz 'epoch' + %(start_us)s::bigint * interval '1 microsecond'
  and a.backend_xid::text::bigint = %(xid)s::bigint & 4294967295
"""
"""End a session only while it is in exactly that transaction: behind a pooler it may serve somebody else by now.

Parameters: pid, start_us, xid. No row: nothing was ended. Locks nothing.
"""

XACT_STATUS: Final = b"""
select case when pg_postmaster_start_time() <= w.start and mine.backend_start <= w.start
            then pg_xact_status(%(xid)s::text::xid8) end
from pg_stat_get_activity(pg_backend_pid()) as mine,
     (values (timestamptz 'epoch' + %(start_us)s::bigint * interval '1 microsecond')) as w(start)
"""
"""Name the outcome of a transaction. Parameters: xid, start_us (of the session that it ran in).

Numbers are used again after a crash, which the postmaster's own start does not show; a session of ours that is older
than the other one and still lives proves that there was none. NULL: unknown. May raise: unknown too. Locks nothing.
"""

"""The transactional mode: what the child says inside its transaction, and what the parent settles after its end."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from shared.pgmq.statements._compose import (
    END_FENCE,
    ENTRY,
    accounts_of,
    archived,
    compose,
    dead_letter_document,
    headers_with_accounts,
    live,
    micros,
)

__all__ = [
    "TERMINATE_BACKEND",
    "XACT_STATUS",
    "claim_one",
    "claimed_body",
    "reckon_dead_letter",
    "reckon_retry",
    "tx_ack_archive",
    "tx_ack_delete",
    "tx_dead_letter",
    "tx_retry",
]


@lru_cache(maxsize=64)
def claim_one(queue: str) -> bytes:
    """Compose the claim of one message inside the child's transaction; no parameters; no row: nothing visible.

    Columns: msg_id, read_ct, enqueued_us, visible_us, accounts, xid, backend_pid, backend_start_us, and one more that
    only leaves a note for `claimed_body`. An empty claim takes no transaction number. vt stays: the row's lock is the
    lease. Locks the row until the end of the transaction.
    """
    return compose(
        """
        with due as materialized (
            select m.tableoid as part, m.ctid as place
            from {q} as m
            where m.vt <= now()
            order by m.vt
            limit 1
            for update of m skip locked
        ), claimed as (
            update {q} as m
            set read_ct = least(m.read_ct, 2147483646) + 1, last_read_at = clock_timestamp()
            from due as d
            where m.ctid = d.place and m.tableoid = d.part
            returning m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.headers
        )
        select msg_id, read_ct, {enqueued_us}, {visible_us}, {accounts},
               pg_current_xact_id_if_assigned()::text::bigint, pg_backend_pid(),
               (select {start_us} from pg_stat_get_activity(pg_backend_pid()) as a),
               set_config('pgmq_supervisor.claimed', msg_id || ' ' || read_ct, true)
        from claimed
        """,
        q=live(queue),
        enqueued_us=micros("enqueued_at"),
        visible_us=micros("vt"),
        accounts=accounts_of("headers"),
        start_us=micros("a.backend_start"),
    )


@lru_cache(maxsize=64)
def claimed_body(queue: str) -> bytes:
    """Compose the load of what `claim_one` of the same transaction claimed: (headers, body) in UTF-8; no parameters.

    It finds the number in a setting that ends with the transaction, so that both go in one pipeline. Locks nothing.
    """
    return compose(
        """
        select convert_to(m.headers::text, 'UTF8'), convert_to(m.message::text, 'UTF8')
        from {q} as m
        where m.msg_id = nullif(split_part(current_setting('pgmq_supervisor.claimed', true), ' ', 1), '')::bigint
          and m.read_ct = nullif(split_part(current_setting('pgmq_supervisor.claimed', true), ' ', 2), '')::integer
        """,
        q=live(queue),
    )


# The row of the statements below is locked by this very transaction, so that no fence is needed; but each must match
# exactly one row, which their caller checks by the number of rows that come back.


@lru_cache(maxsize=64)
def tx_ack_delete(queue: str) -> bytes:
    """Compose the delete of the message claimed here. Parameters: msg_id, read_ct. One row comes back."""
    return compose(
        "delete from {q} as m where m.msg_id = %(msg_id)s and m.read_ct = %(read_ct)s returning m.msg_id", q=live(queue)
    )


@lru_cache(maxsize=64)
def tx_ack_archive(queue: str) -> bytes:
    """Compose the archiving of the message claimed here. Parameters: msg_id, read_ct. One row comes back."""
    return compose(
        """
        with done as (
            delete from {q} as m where m.msg_id = %(msg_id)s and m.read_ct = %(read_ct)s
            returning m.msg_id, m.vt, m.read_ct, m.enqueued_at, m.last_read_at, m.message, m.headers
        ), kept as (
            insert into {a} (msg_id, vt, read_ct, enqueued_at, last_read_at, message, headers)
            select msg_id, vt, read_ct, enqueued_at, last_read_at, message, headers from done
            on conflict do nothing
        )
        select msg_id from done
        """,
        q=live(queue),
        a=archived(queue),
    )


@lru_cache(maxsize=64)
def tx_retry(queue: str) -> bytes:
    """Compose the retry of the message claimed here.

    Parameters: msg_id, read_ct, delay_ms, accounts (JSON text or NULL), set_read_ct (absolute, or NULL to leave it).
    One row comes back.
    """
    return compose(
        """
        update {q} as m
        set vt = clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond',
            read_ct = coalesce(%(set_read_ct)s::integer, m.read_ct),
            last_read_at = {end_fence},
            headers = {headers}
        where m.msg_id = %(msg_id)s and m.read_ct = %(read_ct)s
        returning m.msg_id
        """,
        q=live(queue),
        end_fence=END_FENCE,
        headers=headers_with_accounts(queue, "%(accounts)s::text"),
    )


@lru_cache(maxsize=64)
def tx_dead_letter(queue: str) -> bytes:
    """Compose the move of the message claimed here. Parameters: msg_id, read_ct, target, envelope (JSON text).

    One row comes back.
    """
    return compose(
        """
        with d as (
            delete from {q} as m where m.msg_id = %(msg_id)s and m.read_ct = %(read_ct)s
            returning m.msg_id, m.enqueued_at, m.message, m.headers
        )
        select sent from d cross join lateral pgmq.send(%(target)s::text, {document}) as sent
        """,
        q=live(queue),
        document=dead_letter_document(queue, "%(envelope)s::text"),
    )


# --- the parent, after an attempt whose commit it did not hear of -----------------------------------------------------
#
# Columns of both: (number of rows served, read_ct that this statement saw or NULL, whether the row has the accounts
# that we would write). Locks the row until the commit; a row locked by somebody else is skipped, not waited for.


@lru_cache(maxsize=64)
def reckon_retry(queue: str) -> bytes:
    """Compose the charge of an attempt that was rolled back.

    Parameters: msg_id, before and after (read_ct as it must be, and as it will be), delay_ms, accounts.
    """
    return compose(
        """
        with held as materialized (
            select m.tableoid as part, m.ctid as place
            from {q} as m
            where m.msg_id = %(msg_id)s and m.read_ct = %(before)s
            for update of m skip locked
        ), done as (
            update {q} as m
            set vt = clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond',
                read_ct = %(after)s,
                last_read_at = {end_fence},
                headers = {headers}
            from held as h
            where m.ctid = h.place and m.tableoid = h.part
            returning m.msg_id
        )
        select (select count(*) from done),
               (select max(m.read_ct) from {q} as m where m.msg_id = %(msg_id)s),
               coalesce((select bool_or(case when jsonb_typeof(m.headers -> {entry}) = 'object'
                                     then (m.headers -> {entry}) - 'headers' end = %(accounts)s::jsonb)
                         from {q} as m where m.msg_id = %(msg_id)s), false)
        """,
        q=live(queue),
        end_fence=END_FENCE,
        headers=headers_with_accounts(queue, "%(accounts)s::text"),
        entry=ENTRY,
    )


@lru_cache(maxsize=64)
def reckon_dead_letter(queue: str) -> bytes:
    """Compose the move after the last attempt, rolled back. Parameters: msg_id, before, target, envelope."""
    return compose(
        """
        with held as materialized (
            select m.tableoid as part, m.ctid as place
            from {q} as m
            where m.msg_id = %(msg_id)s and m.read_ct = %(before)s
            for update of m skip locked
        ), done as (
            delete from {q} as m using held as h where m.ctid = h.place and m.tableoid = h.part
            returning m.msg_id, m.enqueued_at, m.message, m.headers
        ), moved as (
            select sent from done as d cross join lateral pgmq.send(%(target)s::text, {document}) as sent
        )
        select (select count(*) from moved),
               (select max(m.read_ct) from {q} as m where m.msg_id = %(msg_id)s),
               false
        """,
        q=live(queue),
        document=dead_letter_document(queue, "%(envelope)s::text"),
    )


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

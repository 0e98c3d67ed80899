"""Claims of the regular mode: take messages, look for the next one, load a body that was too large to come along."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from psycopg import sql

from shared.pgmq.statements._compose import FENCE, accounts_of, compose, live, micros

__all__ = ["BODY_LIMIT", "CLAIM_COLUMNS", "HEADERS_LIMIT", "NO_LIMIT", "claim", "fetch_body", "next_visible"]

BODY_LIMIT: Final = 64 * 1024
"""Messages that PostgreSQL stores in more bytes than this do not come with their claim."""

HEADERS_LIMIT: Final = 16 << 20
"""A claim ends where the stored headers of its messages come to more bytes than this; it has at least one message."""

NO_LIMIT: Final = 2**31 - 1

CLAIM_COLUMNS: Final = 12

# A claim that a crash of the server takes back would leave a second owner with the same read_ct; so it is flushed even
# where the session does not flush (SET LOCAL of this transaction, which is this statement).
_DURABLE: Final = sql.SQL(
    "(select current_setting('synchronous_commit') <> 'off' or set_config('synchronous_commit', 'on', true) = 'on')"
)


@lru_cache(maxsize=1024)
def claim(queue: str, limit: int | None = None) -> bytes:
    """Compose the claim. Parameters: limit, lease_ms, budget, body_limit, headers_limit.

    With `limit` it is no parameter: a plan that is made once for all values of it, as for a prepared statement, would
    be one for a tenth of the table.

    One row a message, ordered by the time since when it could have been claimed; columns as `ClaimedRow` in order,
    with the fence flat, and the transaction's time in microseconds last. Without a message one row comes, all NULL but
    for that time, so that `next_visible` can go on exactly where this look ended.

    Locks: the rows taken, until the commit that ends the statement; rows locked by others are skipped. The order is
    the index's on vt: a second sort key would sort the whole group of equal vt that a big batch leaves.
    """
    return compose(
        """
        with due as materialized (
            select m.tableoid as part, m.ctid as place, m.vt as visible_at, pg_column_size(m.headers) as headers_bytes
            from {q} as m
            where m.vt <= now() and {durable}
            order by m.vt
            limit {limit}
            for update of m skip locked
        ), fits as materialized (
            select part, place, visible_at
            from (
                select part, place, visible_at, row_number() over list as n,
                       coalesce(sum(headers_bytes) over list, 0) as taken
                from due
                window list as (order by visible_at, part, place rows unbounded preceding)
            ) as measured
            where taken <= {headers_budget} or n = 1
        ), claimed as (
            update {q} as m
            set vt = clock_timestamp() + %(lease_ms)s::bigint * interval '1 millisecond',
                read_ct = least(m.read_ct, 2147483646) + 1,
                last_read_at = clock_timestamp()
            from fits as f
            where m.ctid = f.place and m.tableoid = f.part
            returning m.msg_id, m.read_ct, m.enqueued_at, m.last_read_at, m.vt, f.visible_at, m.headers, m.message
        ), texts as materialized (
            select *, case when pg_column_size(message) <= %(body_limit)s
                           then convert_to(message::text, 'UTF8') end as body
            from claimed
        ), sized as (
            select *, sum(coalesce(octet_length(body), 0))
                      over (order by visible_at, msg_id rows unbounded preceding) <= %(budget)s as fits
            from texts
        )
        select msg_id, read_ct, {read_us},
               date_part('epoch', vt - clock_timestamp()),
               {enqueued_us}, {visible_us},
               case when pg_column_size(headers) <= %(headers_limit)s then convert_to(headers::text, 'UTF8') end,
               {accounts},
               case when fits then body end,
               message is null or (body is not null and fits),
               coalesce(octet_length(body)::bigint, pg_column_size(message)::bigint
                        * case when pg_column_compression(message) is null then 2 else 8 end, 0),
               {now_us}
        from (values (now())) as look(at) left join sized on true
        order by visible_at, msg_id
        """,
        q=live(queue),
        limit=sql.SQL("%(limit)s") if limit is None else sql.Literal(limit),
        durable=_DURABLE,
        headers_budget=sql.Literal(HEADERS_LIMIT),
        read_us=micros("last_read_at"),
        enqueued_us=micros("enqueued_at"),
        visible_us=micros("visible_at"),
        accounts=accounts_of("headers"),
        now_us=micros("look.at"),
    )


@lru_cache(maxsize=1024)
def next_visible(queue: str) -> bytes:
    """Compose the look for the next message to come. Parameter: since_us, the time of the look that found nothing.

    One row with seconds from now (never below 0), or none. Without since_us (NULL) the transaction's own time counts.
    Locks nothing. `now()` and not `clock_timestamp()`: only a stable value can bound the index.
    """
    return compose(
        """
        select greatest(extract(epoch from m.vt - clock_timestamp()), 0)::float8
        from {q} as m
        where m.vt > coalesce(timestamptz 'epoch' + %(since_us)s::bigint * interval '1 microsecond', now())
          and m.vt < 'infinity'
        order by m.vt
        limit 1
        """,
        q=live(queue),
    )


@lru_cache(maxsize=1024)
def fetch_body(queue: str) -> bytes:
    """Compose the load of one body by its fence. Parameters: msg_id, read_ct, read_us. No row: not ours any more.

    Locks nothing.
    """
    return compose(
        """
        select convert_to(m.message::text, 'UTF8')
        from {q} as m
        join (values (%(msg_id)s::bigint, %(read_ct)s::integer, %(read_us)s::bigint)) as w(msg_id, read_ct, read_us)
          on {fence}
        """,
        q=live(queue),
        fence=FENCE,
    )

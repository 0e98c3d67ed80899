"""Statements of the client: PGMQ's own functions, each with every argument cast, so that one overload is meant.

Times come as seconds since the epoch: a row parked at 'infinity' has no datetime. JSON travels as text.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from shared.pgmq.statements._compose import compose, piece

__all__ = [
    "ARCHIVE",
    "ARCHIVE_BATCH",
    "CAPABILITIES",
    "CREATE_PARTITIONED",
    "CREATE_PARTITIONED_PREMAKE",
    "DELETE",
    "DELETE_BATCH",
    "DROP",
    "LIST_QUEUES",
    "METRICS",
    "METRICS_ALL",
    "POP",
    "READ",
    "SEND_AT",
    "SEND_BATCH_AT",
    "SET_VT",
    "SET_VT_AT",
    "SET_VT_BATCH",
    "SET_VT_BATCH_AT",
]

_MESSAGE: Final = piece(
    "m.msg_id, m.read_ct, extract(epoch from m.enqueued_at)::float8, extract(epoch from m.last_read_at)::float8,"
    " extract(epoch from m.vt)::float8, m.message::text, m.headers::text"
)

READ: Final = compose(
    """
    select {message}
    from pgmq.read(%(queue)s::text, %(vt_s)s::integer, %(quantity)s::integer, %(where)s::text::jsonb) as m
    order by m.msg_id
    """,
    message=_MESSAGE,
)
"""Take visible messages. Locks them until the commit, skips locked ones. PGMQ takes whole seconds."""

POP: Final = compose(
    "select {message} from pgmq.pop(%(queue)s::text, %(quantity)s::integer) as m order by m.msg_id", message=_MESSAGE
)
"""Take and delete. Locks as READ."""

_IN: Final = sql.SQL("clock_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond'")
_AT: Final = sql.SQL("%(at)s::timestamptz")
_ONE: Final = sql.SQL("%(msg_id)s::bigint")
_MANY: Final = sql.SQL("%(msg_ids)s::bigint[]")


def _set_vt(which: sql.SQL, when: sql.SQL) -> bytes:
    return compose(
        "select {message} from pgmq.set_vt(%(queue)s::text, {which}, {when}) as m order by m.msg_id",
        message=_MESSAGE,
        which=which,
        when=when,
    )


SET_VT: Final = _set_vt(_ONE, _IN)
"""Move the visibility of one message; the database computes the time. Waits for the row's lock."""

SET_VT_AT: Final = _set_vt(_ONE, _AT)
"""As SET_VT, to a given time."""

SET_VT_BATCH: Final = _set_vt(_MANY, _IN)
"""Of many. Waits for the locks of all rows."""

SET_VT_BATCH_AT: Final = _set_vt(_MANY, _AT)
"""Of many, to a given time."""

SEND_AT: Final = b"""
select sent from pgmq.send(%(queue)s::text, %(body)s::text::jsonb, %(headers)s::text::jsonb,
                           %(at)s::timestamptz) as sent
"""
"""Send one message that becomes visible at a given time. Locks as SEND of `queues`."""

SEND_BATCH_AT: Final = b"""
select sent from pgmq.send_batch(%(queue)s::text, %(bodies)s::text[]::jsonb[], %(headers)s::text[]::jsonb[],
                                 %(at)s::timestamptz) as sent
"""
"""Send many that become visible at a given time. Locks as SEND."""

ARCHIVE: Final = b"select pgmq.archive(%(queue)s::text, %(msg_id)s::bigint)"
"""Move one to the archive. Waits for the row's lock."""

ARCHIVE_BATCH: Final = b"select done from pgmq.archive(%(queue)s::text, %(msg_ids)s::bigint[]) as done"
"""Move many. Waits for the locks of all rows."""

DELETE: Final = b"select pgmq.delete(%(queue)s::text, %(msg_id)s::bigint)"
"""Delete one. Waits for the row's lock."""

DELETE_BATCH: Final = b"select done from pgmq.delete(%(queue)s::text, %(msg_ids)s::bigint[]) as done"
"""Delete many. Waits for the locks of all rows."""

CREATE_PARTITIONED: Final = (
    b"select pgmq.create_partitioned(%(queue)s::text, %(partition_interval)s::text, %(retention_interval)s::text)"
)
"""A partitioned queue; needs pg_partman. PGMQ's advisory lock of this queue until the commit."""

CREATE_PARTITIONED_PREMAKE: Final = b"""
select pgmq.create_partitioned(%(queue)s::text, %(partition_interval)s::text, %(retention_interval)s::text,
                               %(premake)s::integer)
"""
"""As CREATE_PARTITIONED, with the number of partitions made ahead, which older versions of PGMQ do not take."""

DROP: Final = b"""
with bound as materialized (select set_config('lock_timeout', %(lock_timeout_ms)s::text, true) as timeout)
select pgmq.drop_queue(%(queue)s::text) from bound where bound.timeout is not null
"""
"""Drop a queue and its archive. ACCESS EXCLUSIVE on both, waited for no longer than lock_timeout_ms."""

LIST_QUEUES: Final = b"""
select queue_name, is_partitioned, is_unlogged, extract(epoch from created_at)::float8
from pgmq.list_queues() order by queue_name
"""
"""Every queue. Locks nothing."""

METRICS: Final = b"select to_jsonb(m)::text from pgmq.metrics(%(queue)s::text) as m"
"""Counts of one queue, as a document: its fields differ by version. Reads the whole table; locks nothing."""

METRICS_ALL: Final = b"select to_jsonb(m)::text from pgmq.metrics_all() as m order by m.queue_name"
"""Counts of every queue. Reads every table; locks nothing."""

CAPABILITIES: Final = b"""
select json_build_object(
    'server_version_num', current_setting('server_version_num')::integer,
    'server_version', current_setting('server_version'),
    'extensions', (select coalesce(json_object_agg(e.extname, e.extversion), '{}')
                   from pg_catalog.pg_extension as e where e.extname in ('pgmq', 'pg_partman')),
    'functions', (
        select coalesce(json_agg(json_build_object(
            'name', p.proname,
            'arguments', (
                select coalesce(json_agg(json_build_object(
                           'name', coalesce(p.proargnames[a.n], ''), 'type', pg_catalog.format_type(a.type, null),
                           'optional', a.n > p.pronargs - p.pronargdefaults) order by a.n), '[]')
                from unnest(p.proargtypes::oid[]) with ordinality as a(type, n)),
            'result', pg_catalog.pg_get_function_result(p.oid),
            'fields', (
                select coalesce(json_agg(json_build_object('name', f.name, 'type', f.type) order by f.n), '[]')
                from (
                    select c.attname::text as name, pg_catalog.format_type(c.atttypid, c.atttypmod) as type,
                           c.attnum::bigint as n
                    from pg_catalog.pg_type as t join pg_catalog.pg_attribute as c on c.attrelid = t.typrelid
                    where t.oid = p.prorettype and t.typrelid <> 0 and c.attnum > 0 and not c.attisdropped
                    union all
                    select p.proargnames[o.n], pg_catalog.format_type(o.type, null), o.n
                    from unnest(p.proallargtypes, p.proargmodes) with ordinality as o(type, mode, n)
                    where o.mode in ('o', 'b', 't')
                ) as f)
            ) order by p.proname, p.pronargs, p.oid), '[]')
        from pg_catalog.pg_proc as p
        where p.pronamespace = pg_catalog.to_regnamespace('pgmq') and p.prokind = 'f')
)::text
"""
"""What server and PGMQ can do, read from the catalogs, as one document. Locks nothing."""

"""The server and our own schema: what it is, what we may do there, which queues are paused."""

from __future__ import annotations

from typing import Final

__all__ = [
    "CREATE_SCHEMA",
    "FACTS",
    "HAS_PGMQ",
    "IN_RECOVERY",
    "LOCK_SCHEMA",
    "PAUSE",
    "PAUSED",
    "PAUSED_TABLE",
    "PING",
    "QUEUE_PRIVILEGES",
    "RESUME",
    "SEE_OTHERS",
]

PING: Final = b"select 1"

IN_RECOVERY: Final = b"select pg_is_in_recovery()"

HAS_PGMQ: Final = b"select to_regclass('pgmq.meta') is not null"

FACTS: Final = b"""
select current_setting('server_version_num')::integer,
       pg_is_in_recovery(),
       getdatabaseencoding()::text,
       to_regclass('pgmq.meta') is not null,
       (select extversion from pg_extension where extname = 'pgmq'),
       current_setting('synchronous_commit'),
       current_setting('max_connections')::integer,
       coalesce(current_setting('superuser_reserved_connections', true)::integer, 0)
         + coalesce(current_setting('reserved_connections', true)::integer, 0),
       (select r.rolconnlimit from pg_roles as r where r.rolname = current_user),
       (select d.datconnlimit from pg_database as d where d.datname = current_database()),
       (select count(*) from pg_stat_activity as a where a.backend_type = 'client backend')::integer,
       current_user::text,
       exists (select from pg_extension where extname = 'pg_partman'),
       current_setting('is_superuser') = 'on'
"""
"""What the server is and grants; -1 as a limit: none. Locks nothing."""

QUEUE_PRIVILEGES: Final = b"""
with t as (
    select to_regclass('pgmq.' || quote_ident('q_' || %(queue)s::text)) as live,
           to_regclass('pgmq.' || quote_ident('a_' || %(queue)s::text)) as kept
)
select t.live is not null,
       coalesce(has_schema_privilege('pgmq', 'usage') and has_table_privilege(t.live, 'select')
                and has_table_privilege(t.live, 'update') and has_table_privilege(t.live, 'delete'), false),
       coalesce(has_table_privilege(t.live, 'insert'), false),
       coalesce(has_table_privilege(t.kept, 'insert'), false),
       coalesce(pg_has_role((select c.relowner from pg_class as c where c.oid = t.live), 'usage'), false)
from t
"""
"""Parameter: queue. Columns: exists, may work on it, may send to it, may archive, owns it (for the trigger)."""

# --- our schema -------------------------------------------------------------------------------------------------------

LOCK_SCHEMA: Final = b"select pg_advisory_xact_lock(7235405173398954358)"
"""One process at a time makes our schema: IF NOT EXISTS alone fails when two do. Until the commit."""

SEE_OTHERS: Final = b"lock table pg_catalog.pg_namespace in access share mode"
"""Make a session forget what it remembers of names: it looked before it waited, and would not look again.

Only the taking of a relation's lock does so in the middle of a transaction; a lock that conflicts with nobody's work.
"""

CREATE_SCHEMA: Final = (
    b"create schema if not exists pgmq_supervisor",
    b"""
    create table if not exists pgmq_supervisor.paused (
        queue text primary key,
        paused_at timestamptz not null default now(),
        by text
    )
    """,
)
"""Our schema. ACCESS EXCLUSIVE on what is new only."""

PAUSED_TABLE: Final = b"select to_regclass('pgmq_supervisor.paused') is not null"

PAUSED: Final = b"select queue from pgmq_supervisor.paused where queue = any(%(queues)s::text[])"
"""Parameter: queues. Those that are paused. Locks nothing."""

PAUSE: Final = b"""
insert into pgmq_supervisor.paused (queue, by) values (%(queue)s, %(by)s) on conflict (queue) do nothing
"""
"""Parameters: queue, by. Locks the new row."""

RESUME: Final = b"delete from pgmq_supervisor.paused where queue = %(queue)s"
"""Parameter: queue. Locks the row."""

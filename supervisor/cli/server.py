"""What must be known of the database before work begins, and what makes it unusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from shared.errors import ConfigurationError, DatabaseError, UnsupportedError
from supervisor.config import Config
from supervisor.core.types import Mode
from supervisor.database.database import sessions_of_parent

__all__ = ["ServerFacts", "look_at_server", "refuse_unusable", "sessions_needed"]

OLDEST_SERVER = 140000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One look at the server."""

    version: int  # as server_version_num
    standby: bool
    read_only: bool  # transactions of this role are, by a setting; a standby's always are
    role: str  # as SQL has it, quoted where it must be
    has_pgmq: bool
    may_use_pgmq: bool  # the schema; what is in it has rights of its own
    max_connections: int
    reserved: int  # for superusers; whoever is one may use them
    role_limit: int | None  # connections that this role may have; None: no limit
    database_limit: int | None
    connected: int

    @property
    def grants(self) -> int:
        """The most connections that we could ever get."""
        limits = [self.max_connections - self.reserved, self.role_limit, self.database_limit]
        return min(limit for limit in limits if limit is not None)


# Reads catalogues and settings only; needs no right in any schema, and takes no locks on tables of anybody. The role's
# limit does not bind superusers. Sessions are counted where every role may: others' are hidden in pg_stat_activity.
_LOOK = """
select current_setting('server_version_num')::int,
       pg_is_in_recovery(),
       current_setting('transaction_read_only')::bool,
       quote_ident(current_user),
       exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = 'pgmq' and c.relname = 'meta'),
       coalesce((select has_schema_privilege(n.oid, 'usage') from pg_namespace n where n.nspname = 'pgmq'), false),
       current_setting('max_connections')::int,
       case when r.rolsuper then 0
            else current_setting('superuser_reserved_connections')::int
                 + coalesce(current_setting('reserved_connections', true)::int, 0) end,
       case when r.rolconnlimit >= 0 and not r.rolsuper then r.rolconnlimit end,
       case when d.datconnlimit >= 0 and not r.rolsuper then d.datconnlimit end,
       (select sum(numbackends) from pg_stat_database)::int
  from pg_roles r, pg_database d
 where r.rolname = current_user and d.datname = current_database()
"""


def look_at_server(connection: psycopg.Connection[Any]) -> ServerFacts:
    """Ask once."""
    row = connection.execute(_LOOK).fetchone()
    assert row is not None
    version, standby, read_only, role, has_pgmq, may_use, most, reserved, role_limit, database_limit, connected = row
    return ServerFacts(
        version=version,
        standby=standby,
        read_only=read_only and not standby,
        role=role,
        has_pgmq=has_pgmq,
        may_use_pgmq=may_use,
        max_connections=most,
        reserved=reserved,
        role_limit=role_limit,
        database_limit=database_limit,
        connected=connected,
    )


def sessions_needed(config: Config) -> int:
    """How many database sessions one supervisor of this configuration may hold at once."""
    regular = sum(queue.mode is Mode.REGULAR for queue in config.queues.values())
    parent = sessions_of_parent(config.database.pool_size, regular_queues=regular)
    return parent + config.sessions_of_children()


def refuse_unusable(config: Config, facts: ServerFacts) -> None:
    """Raise for a server that is too old, has no PGMQ or none for us, or could never grant the connections."""
    if facts.version < OLDEST_SERVER:
        raise UnsupportedError(f"PostgreSQL {facts.version // 10000} is too old", remedy="use PostgreSQL 14 or newer")
    if not facts.has_pgmq:
        raise DatabaseError("PGMQ is not installed in this database", remedy="run `pgmq-supervisor init` once")
    if not facts.may_use_pgmq:
        raise DatabaseError(
            f"the role {facts.role} has no right to use the schema pgmq",
            sqlstate="42501",
            remedy=f"grant usage on schema pgmq to {facts.role}; `pgmq-supervisor check` lists all that is missing",
        )
    needed = sessions_needed(config)
    if needed > facts.grants:
        raise ConfigurationError(
            f"this configuration needs up to {needed} database connections, the server grants {facts.grants}",
            remedy="lower concurrency of transactional queues or [database] pool_size, or raise max_connections",
        )

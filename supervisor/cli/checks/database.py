"""The database: version and state of the server, PGMQ's functions, the configured queues, privileges on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from shared.naming import a_table, q_table
from shared.pgmq.records import AckMode
from supervisor.cli.checks.findings import Finding, fail, ok, warning
from supervisor.cli.server import OLDEST_SERVER, ServerFacts
from supervisor.config import Config
from supervisor.config.models import QueueSection, Storage

__all__ = ["check_pgmq", "check_queues", "check_server"]

NEWEST_SERVER = 190000  # the first that was not tried
FUNCTIONS = (
    "pgmq.acquire_queue_lock(text)",
    "pgmq.create(text)",
    "pgmq.create_unlogged(text)",
    "pgmq.drop_queue(text)",
    "pgmq.enable_notify_insert(text, integer)",
    "pgmq.send(text, jsonb, jsonb, timestamp with time zone)",
    "pgmq.send_batch(text, jsonb[], jsonb[], timestamp with time zone)",
)
TRIED = frozenset({("1", "11"), ("1", "12"), ("1", "13")})
_COLUMNS = ("msg_id", "read_ct", "enqueued_at", "last_read_at", "vt", "message", "headers")
_INIT = "run `pgmq-supervisor init` once"


def check_server(facts: ServerFacts) -> Iterator[Finding]:
    """Look at version and role of the server."""
    number = f"PostgreSQL {facts.version // 10000}.{facts.version % 10000}"
    if facts.version < OLDEST_SERVER:
        yield fail("server", f"{number} is too old", "use PostgreSQL 14 or newer")
    elif facts.version >= NEWEST_SERVER:
        yield warning("server", f"{number} is newer than what was tried (14 to 18)", "look for a newer release of ours")
    else:
        yield ok("server", number)
    if facts.standby:
        yield warning(
            "standby",
            "the server is a hot standby: nothing can be claimed before it is promoted",
            "use a DSN that finds the primary, such as target_session_attrs=read-write with several hosts",
        )
    elif facts.read_only:
        yield fail(
            "read only",
            "transactions are read-only by a setting: nothing can be claimed",
            f"look for default_transaction_read_only at the server, this database and the role {facts.role}",
        )
    else:
        yield ok("primary", "the server is no standby, and can be written to")


def check_pgmq(connection: psycopg.Connection[Any], facts: ServerFacts) -> Iterator[Finding]:
    """Look for PGMQ, by the signatures of what we call, and for our own schema."""
    if not facts.has_pgmq:
        yield fail("pgmq", "PGMQ is not installed in this database", _INIT)
        return
    if not facts.may_use_pgmq:
        yield fail(
            "privileges",
            f"the role {facts.role} has no right to use the schema pgmq",
            f"grant usage on schema pgmq to {facts.role}",
        )
        return
    yield from _functions(connection, facts.role)
    yield from _our_schema(connection, facts.role)


def _functions(connection: psycopg.Connection[Any], role: str) -> Iterator[Finding]:
    """Exact signatures, and whether we may call them. PGMQ from its SQL has no number: its signatures are one."""
    row = connection.execute("select extversion from pg_extension where extname = 'pgmq'").fetchone()
    kind = f"extension {row[0]}" if row else "installed from SQL"
    known = {name: _callable(connection, name) for name in FUNCTIONS}
    if missing := [name for name, may in known.items() if may is None]:
        yield fail("pgmq", f"{kind}, without {', '.join(missing)}", "upgrade PGMQ to 1.11, 1.12 or 1.13")
    elif row and tuple(row[0].split(".")[:2]) not in TRIED:
        yield warning("pgmq", f"{kind} was not tried (1.11 to 1.13)", "look for a release of ours that knows it")
    else:
        yield ok("pgmq", f"{kind}, all functions that we call are there")
    if closed := [name for name, may in known.items() if may is False]:
        listed = ", ".join(closed)
        yield fail("privileges", f"no right to call {listed}", f"grant execute on function {listed} to {role}")


def _our_schema(connection: psycopg.Connection[Any], role: str) -> Iterator[Finding]:
    paused = _regclass(connection, "pgmq_supervisor", "paused")
    if not paused:
        yield warning("schema", "our schema pgmq_supervisor is missing: pause would be local to one supervisor", _INIT)
    elif not _may(connection, paused, "select, insert, delete"):
        yield warning(
            "schema",
            "no right to change pgmq_supervisor.paused: pause would be local to one supervisor",
            f"grant usage on schema pgmq_supervisor to {role}; "
            f"grant select, insert, delete on pgmq_supervisor.paused to {role}",
        )
    else:
        yield ok("schema", "pgmq_supervisor is there")


def check_queues(connection: psycopg.Connection[Any], config: Config, role: str) -> Iterator[Finding]:
    """Look at each queue with its dead-letter queue: there, with the columns we need, with the rights we need."""
    for name, queue in config.queues.items():
        yield from _one_queue(connection, name, queue, role)


def _one_queue(connection: psycopg.Connection[Any], name: str, queue: QueueSection, role: str) -> Iterator[Finding]:
    subject = f"queue {name}"
    target = queue.dead_letter_queue_of(name)
    every = "select, insert, update, delete"  # on dead letters too, for redriving and purging
    absent: list[str] = []
    complaints = 0
    for which, rights in ((name, every), (target, every)):
        table = _regclass(connection, "pgmq", q_table(which))
        if table is None:
            absent.append(which)
            continue
        lacking = [right for right in rights.split(", ") if not _may(connection, table, right)]
        if lacking:
            complaints += 1
            yield fail(
                subject,
                f"no right to {', '.join(lacking)} in pgmq.{q_table(which)}",
                f"grant {rights} on pgmq.{q_table(which)} to {role}",
            )
    table = _regclass(connection, "pgmq", q_table(name))
    if table is not None and (columns := _missing_columns(connection, table)):
        complaints += 1
        yield fail(subject, f"its table has no column {', '.join(columns)}", "upgrade PGMQ to 1.11 or newer")
    archive = _regclass(connection, "pgmq", a_table(name))
    if queue.on_success is AckMode.ARCHIVE and archive is not None and not _may(connection, archive, "insert"):
        complaints += 1
        missing = f"no right to insert into pgmq.{a_table(name)}, which on_success = archive needs"
        yield fail(subject, missing, f"grant insert on pgmq.{a_table(name)} to {role}")
    if absent:
        complaints += 1
        yield _absent(connection, subject, absent, queue)
    if not complaints:
        yield ok(subject, f"it and {target} are there, with the rights that we need")


def _absent(connection: psycopg.Connection[Any], subject: str, absent: list[str], queue: QueueSection) -> Finding:
    """Say what becomes of queues that are not there yet."""
    listed = " and ".join(absent)
    if not queue.create:
        return fail(subject, f"{listed} missing, and create = false", f"{_INIT}, or set create = true")
    if queue.storage is Storage.PARTITIONED and not _extension_available(connection, "pg_partman"):
        return fail(subject, 'storage = "partitioned" needs pg_partman', "install pg_partman, or use another storage")
    row = connection.execute("select has_schema_privilege('pgmq', 'create')").fetchone()
    if row is None or not row[0]:
        return fail(subject, f"{listed} missing, and no right to create it", "run `pgmq-supervisor init` as the owner")
    return ok(subject, f"{listed} not there yet, will be created at start")


def _callable(connection: psycopg.Connection[Any], signature: str) -> bool | None:
    """Tell whether this role may call a function; None where there is none of that signature."""
    row = connection.execute(
        "select has_function_privilege(to_regprocedure(%s)::oid, 'execute')", [signature]
    ).fetchone()
    return None if row is None else row[0]


def _regclass(connection: psycopg.Connection[Any], schema: str, table: str) -> int | None:
    """Find a table's oid; None where there is none. Reads catalogues, so it needs no right in the schema."""
    row = connection.execute(
        "select c.oid::bigint from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = %s and c.relname = %s",
        [schema, table],
    ).fetchone()
    return None if row is None else int(row[0])


def _may(connection: psycopg.Connection[Any], table: int, right: str) -> bool:
    """Whether this role has all of these rights, the schema's included."""
    row = connection.execute(
        "select has_schema_privilege(c.relnamespace, 'usage')"
        " and bool_and(has_table_privilege(c.oid, r)) from pg_class c, unnest(%s::text[]) as r"
        " where c.oid = %s::bigint::oid group by c.oid, c.relnamespace",
        [right.split(", "), table],
    ).fetchone()
    return row is not None and bool(row[0])


def _missing_columns(connection: psycopg.Connection[Any], table: int) -> list[str]:
    rows = connection.execute(
        "select attname from pg_attribute where attrelid = %s::bigint::oid and not attisdropped", [table]
    ).fetchall()
    present = {name for (name,) in rows}
    return [column for column in _COLUMNS if column not in present]


def _extension_available(connection: psycopg.Connection[Any], name: str) -> bool:
    row = connection.execute("select exists (select from pg_available_extensions where name = %s)", [name]).fetchone()
    return row is not None and bool(row[0])

"""PGMQ where it is missing: the extension where the server offers it, else the SQL that the wheel `pgmq` ships."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import psycopg

from shared.errors import DatabaseError, UnsupportedError

__all__ = ["Installed", "install_pgmq", "shipped_sql"]

# Any number, as long as every version of ours uses the same one.
_LOCK_KEY: Final = 0x70676D71_73757076


class Installed(StrEnum):
    """What was done."""

    ALREADY = "already"
    EXTENSION = "extension"
    SQL = "sql"


def install_pgmq(connection: psycopg.Connection[Any]) -> Installed:
    """Install PGMQ unless it is there, in one transaction; any number of processes may do so at once.

    The connection must not be inside a transaction. Raises `DatabaseError` where the role may not install it or
    where a half-made `pgmq` schema is in the way.
    """
    try:
        with connection.transaction():
            if _is_present(connection):
                return Installed.ALREADY
            # Waits for others that install; released at the end of the transaction.
            connection.execute("select pg_advisory_xact_lock(%s)", [_LOCK_KEY])
            if _is_present(connection):
                return Installed.ALREADY
            if _extension_is_available(connection):
                connection.execute("create extension pgmq")
                return Installed.EXTENSION
            # Without parameters the text goes as one simple query: many statements, the same transaction.
            connection.execute(shipped_sql().encode(), prepare=False)
            return Installed.SQL
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseError(
            f"this role may not install PGMQ: {error.diag.message_primary}",
            operation="install PGMQ",
            sqlstate=error.sqlstate,
            remedy="run init once as a role that may create schemas (or the extension) in this database",
        ) from error
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise DatabaseError(
            f"PGMQ could not be installed: {error}",
            operation="install PGMQ",
            sqlstate=error.sqlstate,
            remedy="look for a half-made schema pgmq in this database",
        ) from error


def _is_present(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether the catalogue of queues and the functions that we build on are there."""
    row = connection.execute(
        "select to_regclass('pgmq.meta') is not null"
        " and exists (select from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        "             where n.nspname = 'pgmq' and p.proname = 'send')"
        " and exists (select from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        "             where n.nspname = 'pgmq' and p.proname = 'create')"
    ).fetchone()
    return bool(row and row[0])


def _extension_is_available(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether CREATE EXTENSION pgmq can work."""
    row = connection.execute("select exists (select from pg_available_extensions where name = 'pgmq')").fetchone()
    return bool(row and row[0])


def shipped_sql() -> str:
    """Read the SQL of the wheel `pgmq`, without importing its code. Raises `UnsupportedError` where there is none."""
    spec = importlib.util.find_spec("pgmq")
    if spec is not None and spec.origin:
        path = Path(spec.origin).parent / "sql" / "pgmq.sql"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise UnsupportedError(
        "this database has no PGMQ, the server does not offer the extension, and the package pgmq is not installed",
        operation="install PGMQ",
        remedy="pip install pgmq, or install the extension on the server",
    )

"""Fresh databases with PGMQ in them, cloned from a template."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Final

import psycopg
from psycopg import conninfo, sql

from supervisor.embedded import install_pgmq

TEMPLATE: Final = f"pgmq_template_{os.getpid()}"
_numbers = itertools.count(1)


def with_dbname(dsn: str, dbname: str) -> str:
    """Give the DSN of another database of the same server."""
    return conninfo.make_conninfo(dsn, dbname=dbname)


def make_template(dsn: str) -> None:
    """Make the database that the tests' databases are cloned from."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(TEMPLATE)))
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(TEMPLATE)))
    with psycopg.connect(with_dbname(dsn, TEMPLATE), autocommit=True) as connection:
        install_pgmq(connection)


def drop_template(dsn: str) -> None:
    """Remove the template, on a server that outlives the tests."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(TEMPLATE)))


@contextlib.contextmanager
def fresh_database(dsn: str, *, template: str | None = TEMPLATE) -> Iterator[str]:
    """Make a database, give its DSN, and drop it whatever is still connected to it."""
    name = sql.Identifier(dbname := f"test_{os.getpid()}_{next(_numbers)}")
    source = sql.Identifier(template or "template0")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {} template {}").format(name, source))
    try:
        yield with_dbname(dsn, dbname)
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(name))

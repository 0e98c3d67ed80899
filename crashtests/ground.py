"""The ground that a scenario stands on: a private folder, a PostgreSQL server of its own, fresh databases with PGMQ.

Durable settings: what the harness kills includes PostgreSQL itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import conninfo, sql

from supervisor.embedded import EmbeddedServer, install_pgmq

__all__ = ["Ground", "Session", "connect", "ground", "private_folder", "with_dbname"]

Session = psycopg.Connection[tuple[Any, ...]]

_SETTINGS: Final = {"max_connections": "300", "max_wal_size": "2GB"}
_APPLICATION: Final = "crashtests"
_CONNECT_LIMIT_S: Final = 10

_BUSINESS: Final = """
create table crash_business (
    op text primary key, -- the stable operation id that the failure model asks users for
    delivery integer not null,
    pid integer not null,
    at timestamptz not null default clock_timestamp()
)
"""


def make_business(dsn: str) -> None:
    """Make the table of the harness's own handlers."""
    with connect(dsn) as connection:
        connection.execute(_BUSINESS)


def connect(dsn: str) -> Session:
    """A session of the harness's own, in autocommit, told from the others by its name."""
    return psycopg.connect(dsn, autocommit=True, application_name=_APPLICATION, connect_timeout=_CONNECT_LIMIT_S)


def with_dbname(dsn: str, dbname: str) -> str:
    """The DSN of another database of the same server."""
    return conninfo.make_conninfo(dsn, dbname=dbname)


@contextlib.contextmanager
def private_folder(name: str) -> Iterator[Path]:
    """An empty folder with a short path, which PostgreSQL's user can pass through; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"crash-{name}-", dir=_short_place()))
    try:
        if os.geteuid() == 0:
            folder.chmod(0o711)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _short_place() -> str | None:
    """Where sockets may lie: their paths have at most 107 bytes."""
    chosen = tempfile.gettempdir()
    return chosen if len(chosen) <= 40 else "/var/tmp"  # noqa: S108 - mkdtemp makes a private folder in it


class Ground:
    """A server and what is made on it. Safe to use from several threads."""

    def __init__(
        self, server: EmbeddedServer | None, dsn: str, *, prepare: Callable[[str], None] | None = None
    ) -> None:
        """`server` None: somebody else's, which is not killed, and where nothing but queues is made.

        `prepare` gets the DSN of the database that all others are copied from.
        """
        self.server = server
        self.dsn = dsn
        self._numbers = itertools.count(1)
        self._prepare = prepare
        self._lock = threading.Lock()
        self._template: str | None = None

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database with PGMQ, dropped afterwards whoever is connected. On a foreign server: the given one."""
        template = self._make_template()
        if self.server is None:
            yield self.dsn
            return
        with self._lock:  # a template that is being copied must have no sessions, also not those of another copy
            name = f"crash_{os.getpid()}_{next(self._numbers)}"
            self._execute(sql.SQL("create database {} template {}").format(*map(sql.Identifier, (name, template))))
        try:
            yield with_dbname(self.dsn, name)
        finally:
            with contextlib.suppress(psycopg.OperationalError):  # a server that was killed and not started again
                self._execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _make_template(self) -> str:
        with self._lock:
            if self._template is None:
                name = f"crash_{os.getpid()}_template"
                dsn = self.dsn
                if self.server is not None:
                    self._execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
                    dsn = with_dbname(self.dsn, name)
                with connect(dsn) as connection:
                    connection.execute("set client_min_messages to warning")
                    install_pgmq(connection)
                if self._prepare is not None:
                    self._prepare(dsn)
                self._template = name
            return self._template

    def _execute(self, statement: sql.Composed) -> None:
        with connect(self.dsn) as connection:
            connection.execute(statement)


@contextlib.contextmanager
def ground(
    settings: Mapping[str, str] | None = None,
    *,
    prepare: Callable[[str], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Ground]:
    """Start a server in a folder of its own; stopped and removed afterwards."""
    with private_folder("pg") as folder:
        place = folder / "pg"
        server = EmbeddedServer(place, base=folder, explicit=True, settings={**_SETTINGS, **(settings or {})}, say=say)
        with server:
            yield Ground(server, server.dsn(), prepare=prepare or make_business)

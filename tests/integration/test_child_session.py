"""A child's session, as it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import conninfo

from child.database import Database
from shared.pgmq.libpq import KEEPALIVE


@contextmanager
def session(dsn: str) -> Iterator[Database]:
    """Give one for a queue that stands."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmq.create('jobs')")
    database = Database(
        dsn=dsn, application_name="pgmq-supervisor jobs 1.1", queue="jobs", lease_ms=30_000, own_timeout_ms=30_000
    )
    try:
        yield database
    finally:
        database.close()


def parameters(database: Database) -> dict[str, str]:
    """What libpq was asked for."""
    return database.open().info.get_parameters()


def test_a_peer_that_is_gone_is_found_as_soon_as_by_the_parent(database: str) -> None:
    """Keepalives, and a limit for what was sent and not acknowledged, which keepalives do not see."""
    with session(database) as opened:
        opened_with = parameters(opened)
        assert KEEPALIVE.items() <= opened_with.items()
        assert opened_with["application_name"] == "pgmq-supervisor jobs 1.1"


def test_the_dsn_has_the_last_word(database: str) -> None:
    """What it says stays as it is; the rest is ours."""
    with session(conninfo.make_conninfo(database, tcp_user_timeout=3000, application_name="mine")) as opened:
        opened_with = parameters(opened)
        assert (opened_with["tcp_user_timeout"], opened_with["application_name"]) == ("3000", "mine")
        assert opened_with["keepalives_idle"] == KEEPALIVE["keepalives_idle"]

"""Fixtures for every kind of test: one embedded server a session, a fresh database a test.

`SUPERVISOR_TEST_DSN` points the database tests at another server (a superuser's DSN). `SUPERVISOR_TEST_POSTGRES` names
a folder with programs of another version, which the tests' own servers are then made of; see `tests.matrix`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from supervisor.embedded import EmbeddedServer
from tests.support.binaries import chosen_binaries
from tests.support.databases import drop_template, fresh_database, make_template
from tests.support.folders import reachable_folder
from tests.support.proxy import Proxy

# How long one example takes says more about what else the machine does than about the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# Nothing in a test's database has to survive this machine; durability is what the crash tests' own servers are for.
FAST_SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on", "max_connections": "300"}


@pytest.fixture(scope="session")
def pg_server() -> Iterator[EmbeddedServer]:
    """Start the session's server, fast rather than durable; tests leave it running."""
    with (
        reachable_folder("tests") as folder,
        EmbeddedServer(
            folder, base=folder, explicit=True, settings=FAST_SETTINGS, binaries=chosen_binaries()
        ) as server,
    ):
        yield server


@pytest.fixture(scope="session")
def server_dsn(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the DSN of a superuser of the session's server, where the template database is ready."""
    given = os.environ.get("SUPERVISOR_TEST_DSN")
    dsn: str = given or request.getfixturevalue("pg_server").dsn()
    make_template(dsn)
    yield dsn
    drop_template(dsn)


@pytest.fixture
def database(server_dsn: str) -> Iterator[str]:
    """Give the DSN of a fresh database with PGMQ in it; dropped after the test, whatever is still connected."""
    with fresh_database(server_dsn) as dsn:
        yield dsn


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """Give a network before `database` that cuts, freezes, delays, and loses answers when it is told to."""
    with Proxy(database) as made:
        yield made


@pytest.fixture
def bare_database(server_dsn: str) -> Iterator[str]:
    """Give the DSN of a fresh database without PGMQ."""
    with fresh_database(server_dsn, template=None) as dsn:
        yield dsn


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """Start a server for this test alone: crash it, stop it, start it again; `dsn()` stays the same."""
    with (
        reachable_folder("server") as folder,
        EmbeddedServer(
            folder, base=folder, explicit=True, settings={"fsync": "off"}, binaries=chosen_binaries()
        ) as server,
    ):
        yield server

"""PGMQ as an extension, as hosted databases have it: made by CREATE EXTENSION, its schema the property of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from supervisor.embedded import EmbeddedServer, Installed, install_pgmq
from tests.support.both_modes import CONFIG, TASKS, work
from tests.support.cli import Done, typed
from tests.support.clients import FACES, open_client
from tests.support.databases import fresh_database
from tests.support.extension import VERSION, extension_server
from tests.support.roles import grant_what_check_asks, ordinary_role


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """Give a server on which CREATE EXTENSION pgmq works."""
    with extension_server() as started:
        yield started


@pytest.fixture
def database(server: EmbeddedServer) -> Iterator[str]:
    """Give the DSN of a database without PGMQ."""
    with fresh_database(server.dsn(), template=None) as dsn:
        yield dsn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with a configuration and its module."""
    (tmp_path / "supervisor.toml").write_text(CONFIG)
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def worker(database: str) -> Iterator[str]:
    """Give the DSN of a role that may log in."""
    with ordinary_role(database, "worker") as dsn:
        yield dsn


def findings(done: Done) -> dict[str, Any]:
    """What check found, by its subject."""
    return {finding["subject"]: finding for finding in done.json["findings"]}


def test_init_installs_the_extension_where_the_server_has_it_and_both_modes_work(folder: Path, database: str) -> None:
    """`init` prefers it to its own SQL; check names its version and finds nothing wrong; work goes as ever."""
    assert VERSION not in typed("check", "--json", cwd=folder, dsn=database).out
    done = typed("init", cwd=folder, dsn=database)
    assert done.code == 0
    assert "extension" in done.out
    with psycopg.connect(database, autocommit=True) as connection:
        assert connection.execute("select extversion from pg_extension where extname = 'pgmq'").fetchone() == (VERSION,)
        assert install_pgmq(connection) is Installed.ALREADY
    done = typed("check", "--json", cwd=folder, dsn=database)
    found = findings(done)
    assert done.code == 0
    assert f"extension {VERSION}" in found["pgmq"]["text"]
    assert [finding for finding in found.values() if finding["level"] != "ok"] == []
    work(folder, database, database)


def test_an_ordinary_role_works_with_the_extension_of_a_superuser(folder: Path, database: str, worker: str) -> None:
    """It may not install it and is told so; with what check asks to be granted it runs both modes."""
    done = typed("init", cwd=folder, dsn=worker)
    assert done.code == 1
    assert "may not install PGMQ" in done.err
    assert typed("init", cwd=folder, dsn=database).code == 0
    done, _ = grant_what_check_asks(folder, database, worker)
    assert [one for one in done.json["findings"] if one["level"] != "ok"] == []
    work(folder, database, worker)


@pytest.mark.parametrize("face", FACES)
async def test_the_client_tells_the_version_of_the_extension(face: str, database: str) -> None:
    """Known before it is created and not claimed; then its number, with the functions and what they do."""
    async with open_client(face, database) as client:
        found = await client.capabilities()
        assert (found.has_pgmq, found.pgmq_version) == (False, None)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("create extension pgmq")
        found = await client.capabilities(refresh=True)
        assert (found.has_pgmq, found.pgmq_version) == (True, VERSION)
        assert found.takes("send", "text", "jsonb", "jsonb", "timestamp with time zone")
        await client.create("orders")
        assert await client.send("orders", {"id": 1}) == 1
        [message] = await client.read("orders")
        assert message.body == {"id": 1}
        assert await client.archive("orders", 1)
        await client.drop("orders")

"""A hot standby at start: nothing is claimed, it is told once, and work begins by itself after the promotion."""

from __future__ import annotations

import asyncio

import psycopg

from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.embedded import EmbeddedServer, install_pgmq
from supervisor.telemetry.facts import Noted
from tests.support.rows import Rows
from tests.support.shell import NAME, running


async def test_a_standby_is_waited_for(own_server: EmbeddedServer) -> None:
    """Start succeeds, claims fail without harm, the listener comes up with the promotion."""
    with psycopg.connect(own_server.dsn(), autocommit=True) as connection:
        install_pgmq(connection)
    with Rows(own_server.dsn()) as rows:
        rows.send(1)
    signal_file = own_server.data_path / "standby.signal"
    await asyncio.to_thread(own_server.stop)
    signal_file.touch()
    await asyncio.to_thread(own_server.start)
    async with running(own_server.dsn(), notify=True) as shell:
        assert shell.database.standby
        assert "standby" in (await shell.facts.next(Noted)).text
        assert not await shell.database.ping()
        shell.database.claim(c.Claim(NAME, 1, 30, 1000))
        assert "read-only" in (await shell.events.next(e.ClaimFailed)).error
        assert shell.facts.all == []  # one line says it all
        with psycopg.connect(own_server.dsn(), autocommit=True) as connection:
            connection.execute("select pg_promote()")
        assert await shell.database.ping()
        await shell.events.next(e.ListenerUp)
        assert len(await shell.rows()) == 1

"""Notifications: heard, found again after every loss, repaired when PGMQ's trigger or throttle row is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Self

import psycopg
import pytest

from supervisor.core import events as e
from supervisor.embedded import EmbeddedServer, install_pgmq
from supervisor.telemetry.facts import ListenerReconnected, NotifyRepaired, NotifySetupFailed
from tests.support.clients import until
from tests.support.rows import QUEUE, Rows
from tests.support.shell import NAME, running

TRIGGER = "trigger_notify_queue_insert_listeners"


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


async def _notified(rows: Rows) -> None:
    """Wait until the queue has a trigger."""
    await until(lambda: rows.ask("select count(*) from pg_trigger where tgname = %s", TRIGGER) == 1)


def _send(rows: Rows) -> None:
    rows.connection.execute("select pgmq.send(%s, '1')", [QUEUE])


async def test_an_insert_is_heard(rows: Rows, database: str) -> None:
    """LISTEN first, ListenerUp second, the trigger made where there was none, which is no repair."""
    async with running(database, notify=True) as shell:
        assert await shell.events.next(e.ListenerUp) == e.ListenerUp((NAME,))
        await _notified(rows)
        _send(rows)
        assert await shell.events.next(e.Notified) == e.Notified(NAME)
        assert not any(isinstance(fact, NotifyRepaired) for fact in shell.facts.all)


async def test_a_trigger_that_stands_is_not_made_again(rows: Rows, database: str) -> None:
    """Its table's lock is nobody's to take at each start."""
    rows.connection.execute("select pgmq.enable_notify_insert(%s, 77)", [QUEUE])
    oid = rows.ask("select oid from pg_trigger where tgname = %s", TRIGGER)
    with psycopg.connect(database) as other:
        other.execute(f"select count(*) from pgmq.q_{QUEUE}")  # holds a lock that DROP TRIGGER would wait for
        async with running(database, notify=True) as shell:
            await shell.events.next(e.ListenerUp)
            _send(rows)
            await shell.events.next(e.Notified)
    assert rows.ask("select oid from pg_trigger where tgname = %s", TRIGGER) == oid
    assert rows.ask("select throttle_interval_ms from pgmq.notify_insert_throttle") == 77


async def test_listener_comes_back_each_time_it_is_killed(rows: Rows, database: str) -> None:
    """LISTEN again, ListenerUp again, a counter; and what is sent then is heard."""
    rows.connection.execute("select pgmq.enable_notify_insert(%s, 0)", [QUEUE])
    async with running(database, notify=True) as shell:
        await shell.events.next(e.ListenerUp)
        for _ in range(5):
            killed = rows.ask(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where application_name = 'pgmq-supervisor listen' and datname = current_database()"
            )
            assert killed == 1
            await shell.events.next(e.ListenerDown)
            await shell.events.next(e.ListenerUp)
            await shell.facts.next(ListenerReconnected)
        shell.events.all.clear()
        _send(rows)
        await shell.events.next(e.Notified)


async def test_a_lost_throttle_row_is_put_back(rows: Rows, database: str) -> None:
    """A crash of the server empties its table; without the row the trigger is silent for good."""
    rows.connection.execute("select pgmq.enable_notify_insert(%s)", [QUEUE])
    async with running(database, notify=True, keep_interval_s=0.1) as shell:
        await shell.events.next(e.ListenerUp)
        rows.connection.execute("delete from pgmq.notify_insert_throttle")
        with psycopg.connect(database) as other:
            other.execute(f"select count(*) from pgmq.q_{QUEUE}")  # no lock of the table is needed
            assert await shell.facts.next(NotifyRepaired) == NotifyRepaired(NAME, "throttle")
        _send(rows)
        await shell.events.next(e.Notified)


@pytest.mark.parametrize("harm", ["drop trigger {t} on {q}", "alter table {q} disable trigger {t}"])
async def test_a_lost_trigger_is_made_again(rows: Rows, database: str, harm: str) -> None:
    """Dropped or disabled at run time: found by the timer."""
    rows.connection.execute("select pgmq.enable_notify_insert(%s)", [QUEUE])
    async with running(database, notify=True, keep_interval_s=0.1) as shell:
        await shell.events.next(e.ListenerUp)
        rows.connection.execute(harm.format(t=TRIGGER, q=f"pgmq.q_{QUEUE}"))
        assert await shell.facts.next(NotifyRepaired) == NotifyRepaired(NAME, "trigger")
        _send(rows)
        await shell.events.next(e.Notified)


async def test_a_locked_queue_is_polled_loudly_until_the_trigger_can_be_made(rows: Rows, database: str) -> None:
    """The lock timeout ends the attempt, it is told once, and repaired later."""
    async with running(database, notify=True, keep_interval_s=0.1) as shell:
        with psycopg.connect(database) as other:
            other.execute(f"lock table pgmq.q_{QUEUE} in row exclusive mode")
            with contextlib.suppress(TimeoutError):
                assert (await shell.facts.next(NotifySetupFailed)).queue == NAME
        await shell.facts.next(NotifyRepaired)


async def test_a_queue_that_is_still_to_be_made_is_no_failure(database: str) -> None:
    """The listener may be up before the queues are; the trigger follows."""
    async with running(database, notify=True) as shell:
        await shell.events.next(e.ListenerUp)
        with Rows(database) as rows:
            await _notified(rows)
            _send(rows)
            await shell.events.next(e.Notified)
        assert not any(isinstance(fact, NotifySetupFailed) for fact in shell.facts.all)


async def test_twenty_supervisors_start_at_once(rows: Rows, database: str) -> None:
    """One makes the trigger, all are up and hear."""
    async with contextlib.AsyncExitStack() as stack:
        shells = await asyncio.gather(
            *(stack.enter_async_context(running(database, notify=True, pool_size=1)) for _ in range(20))
        )
        for shell in shells:
            await shell.events.next(e.ListenerUp)
        await _notified(rows)
        _send(rows)
        for shell in shells:
            await shell.events.next(e.Notified)
            assert not any(isinstance(fact, NotifySetupFailed) for fact in shell.facts.all)


async def test_a_crash_of_the_server_is_survived(own_server: EmbeddedServer) -> None:
    """Immediate stop, start: listener, claims and notifications come back by themselves."""
    with psycopg.connect(own_server.dsn(), autocommit=True) as connection:
        install_pgmq(connection)
    with Rows(own_server.dsn()) as rows:
        rows.connection.execute("select pgmq.enable_notify_insert(%s)", [QUEUE])
        rows.send(1)
    async with running(own_server.dsn(), notify=True) as shell:
        await shell.events.next(e.ListenerUp)
        await asyncio.to_thread(own_server.stop, "immediate")
        await shell.events.next(e.ListenerDown)
        await asyncio.to_thread(own_server.start)
        await shell.events.next(e.ListenerUp)
        await shell.facts.next(NotifyRepaired, lambda fact: fact.what == "throttle")
        with Rows(own_server.dsn(), create=False) as rows:
            _send(rows)
        await shell.events.next(e.Notified)


class _Proxy:
    """A TCP relay that can go silent, as a dead network does."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()  # not closed: silent
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    def fall_silent(self) -> None:
        """Pass nothing on in either direction, without closing anything."""
        self._open.clear()

    def recover(self) -> None:
        """Pass everything on again."""
        self._open.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target
        if host.startswith("/"):
            far_reader, far_writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._relay(source, sink))
            self._tasks.add(task)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
            sink.close()

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def _proxied(dsn: str) -> AsyncIterator[tuple[_Proxy, str]]:
    """Give a proxy in front of the server, and the DSN through it."""
    with psycopg.connect(dsn) as connection:
        host, port = connection.info.host, connection.info.port
    async with _Proxy(host, port) as proxy:
        yield proxy, psycopg.conninfo.make_conninfo(dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=proxy.port)


async def test_a_half_open_connection_is_found(rows: Rows, database: str) -> None:
    """Nothing comes any more and nothing is closed: the heartbeat finds out, a new connection listens."""
    async with (
        _proxied(database) as (proxy, listen_dsn),
        running(database, notify=True, listen_dsn=listen_dsn, heartbeat_s=0.3, connect_timeout_s=2) as shell,
    ):
        await shell.events.next(e.ListenerUp)
        proxy.fall_silent()
        await shell.events.next(e.ListenerDown, within_s=5)
        proxy.recover()
        await shell.events.next(e.ListenerUp)


async def test_a_claim_through_a_dead_network_is_answered(rows: Rows, database: str) -> None:
    """Bounded by the statement timeout and a little; afterwards claims work again."""
    rows.send(1)
    async with (
        _proxied(database) as (proxy, dsn),
        running(dsn, statement_timeout_s=0.5, connect_timeout_s=2, pool_size=1) as shell,
    ):
        proxy.fall_silent()
        shell.renew((1, 1, 1), timeout_s=0.5)  # type: ignore[arg-type]
        await shell.events.next(e.RenewFailed, within_s=2)
        proxy.recover()
        assert len(await shell.rows()) == 1

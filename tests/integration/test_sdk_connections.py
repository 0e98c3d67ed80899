"""The client: its pool and its connections, on both faces."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shared.errors import ConnectionLost, OperationTimeout, ValidationError
from shared.pgmq import connections
from shared.pgmq.blocking import Client
from tests.support.clients import FACES, open_client, until
from tests.support.proxy import Proxy
from tests.support.waiting import eventually


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    """Name a face of the client."""
    name: str = request.param
    return name


@pytest.fixture
def orders(database: str) -> str:
    """Give the DSN of a database with the queue `orders`."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select pgmq.create('orders')")
    return database


@pytest.fixture
async def far(face: str, orders: str, proxy: Proxy) -> AsyncIterator[Any]:
    """Give a client behind the proxy."""
    async with open_client(face, proxy.dsn, pool_size=2) as client:
        yield client


def sessions(dsn: str, name: str) -> list[int]:
    """List the backends of an application."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute("select pid from pg_stat_activity where application_name = %s", [name]).fetchall()
    return [pid for (pid,) in rows]


async def test_nothing_is_connected_before_it_is_needed(face: str, orders: str) -> None:
    """The pool is lazy, bounded, and its connections are used again."""
    async with open_client(face, orders, pool_size=3, application_name="lazy") as client:
        assert sessions(orders, "lazy") == []
        await client.send("orders", 1)
        first = sessions(orders, "lazy")
        await client.send("orders", 2)
        assert sessions(orders, "lazy") == first
        await asyncio.gather(*(client.send("orders", n) for n in range(30)))
        assert 1 <= len(sessions(orders, "lazy")) <= 3
    eventually(lambda: not sessions(orders, "lazy"), what="the end of every session")


async def test_an_unreachable_server_is_told_at_once(face: str, proxy: Proxy) -> None:
    """The cause stands in the error, not a timeout of the pool; nothing was sent."""
    proxy.refuse()
    async with open_client(face, proxy.dsn) as client:
        with pytest.raises(ConnectionLost, match="nothing was sent") as caught:
            await client.send("orders", 1)
        assert (caught.value.category, caught.value.operation, caught.value.retryable) == (
            "connection",
            "connect",
            True,
        )
        assert caught.value.remedy


async def test_a_server_that_came_back_is_used(far: Any, proxy: Proxy) -> None:
    """After an outage the next call connects by itself."""
    await far.send("orders", 1)
    proxy.refuse()
    proxy.cut()
    with pytest.raises(ConnectionLost):
        await far.send("orders", 2)
    proxy.accept()
    assert await far.send("orders", 3) == 2


async def test_a_server_that_does_not_answer_is_given_up(face: str, orders: str, proxy: Proxy) -> None:
    """connect_timeout bounds the wait for a server that accepts and says nothing."""
    proxy.freeze()
    async with open_client(face, proxy.dsn, connect_timeout="2s") as client:
        with pytest.raises(ConnectionLost, match="nothing was sent"):
            await client.send("orders", 1)


async def test_an_exhausted_pool_says_that_nothing_was_sent(face: str, orders: str) -> None:
    """Every connection is out: a timeout after acquire_timeout, and the next one in line gets what is given back."""
    async with open_client(face, orders, pool_size=1, acquire_timeout="100ms") as client:
        async with client.transaction():
            with pytest.raises(OperationTimeout, match="nothing was sent") as caught:
                await client.send("orders", 1)
            assert (caught.value.category, caught.value.retryable) == ("timeout", True)
        assert await client.metrics("orders") is not None
        assert (await client.metrics("orders")).length == 0


async def test_those_who_wait_get_their_turn(face: str, orders: str) -> None:
    """Forty senders on two connections all come through."""
    async with open_client(face, orders, pool_size=2) as client:
        ids = await asyncio.gather(*(client.send("orders", n) for n in range(40)))
    assert len(set(ids)) == 40


async def test_a_dead_idle_connection_is_replaced_before_anything_is_sent(far: Any, orders: str, proxy: Proxy) -> None:
    """Cut while idle: the next write goes out once, on a new connection."""
    await far.send("orders", "first")
    assert proxy.cut() == 1
    eventually(lambda: proxy.open_connections == 0)
    assert await far.send("orders", "second") == 2
    assert len(proxy.statements("pgmq.send(")) == 2


async def test_a_terminated_idle_session_is_replaced(face: str, orders: str) -> None:
    """pg_terminate_backend of any idle session goes unnoticed by senders."""
    async with open_client(face, orders, application_name="victim", pool_size=1) as client:
        for n in range(3):
            await client.send("orders", n)
            (pid,) = sessions(orders, "victim")
            with psycopg.connect(orders, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s, 10000)", [pid])
        assert (await client.metrics("orders")).length == 3


async def test_a_half_open_connection_is_found_before_it_is_used(
    far: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that rested is asked first; one that does not answer in time is replaced."""
    monkeypatch.setattr(connections, "PING_AFTER_S", 0.0)
    monkeypatch.setattr("shared.pgmq.pool.PING_TIMEOUT_S", 0.3)
    await far.send("orders", 1)
    assert proxy.freeze_open() == 1
    assert await far.send("orders", 2) == 2
    assert proxy.accepted == 2


async def test_a_closed_client_refuses(face: str, orders: str) -> None:
    """After close nothing is sent; what was in use is closed when it comes back."""
    client = open_client(face, orders, application_name="closing")
    async with client.transaction() as tx:
        await client.close()
        assert (await tx.execute("select 1")).value() == 1
    with pytest.raises(ValidationError, match="closed"):
        await client.send("orders", 1)
    eventually(lambda: not sessions(orders, "closing"))


async def test_closing_ends_a_long_poll(far: Any, proxy: Proxy) -> None:
    """Whoever waits for messages is told that the client is closed."""
    poll = asyncio.ensure_future(far.read_with_poll("orders", max_wait="60s", interval="50s"))
    await until(lambda: proxy.statements("pgmq.read("))
    await far.close()
    async with asyncio.timeout(20):
        with pytest.raises(ValidationError, match="closed"):
            await poll


async def test_options_of_libpq_pass_through(face: str, orders: str) -> None:
    """Ours are only defaults; what is in the DSN, in arguments or in `options` reaches the server."""
    given = {"application_name": "named", "options": "-c work_mem=1234kB", "statement_timeout": "7s"}
    async with open_client(face, orders, **given) as client, client.transaction() as tx:
        shown = [
            (await tx.execute(f"show {name}")).value() for name in ("application_name", "work_mem", "statement_timeout")
        ]
        assert shown == ["named", "1234kB", "7s"]


async def test_the_callers_statement_timeout_wins(face: str, orders: str) -> None:
    """One in `options` comes after ours; none of ours is set when it is "none"."""
    async with open_client(face, orders, options="-c statement_timeout=1234") as client, client.transaction() as tx:
        assert (await tx.execute("show statement_timeout")).value() == "1234ms"
    async with open_client(face, orders, statement_timeout="none") as client, client.transaction() as tx:
        assert (await tx.execute("show statement_timeout")).value() == "0"


async def test_tls_is_libpqs_business(face: str, orders: str, proxy: Proxy) -> None:
    """The mode reaches libpq: a server without TLS is refused when it is required, and used when it is not."""
    async with open_client(face, proxy.dsn, sslmode="require") as client:
        with pytest.raises(ConnectionLost, match="SSL"):
            await client.send("orders", 1)
    async with open_client(face, proxy.dsn, sslmode="verify-full", sslrootcert="/nowhere") as client:
        with pytest.raises(ConnectionLost, match=r"root|certificate|SSL"):
            await client.send("orders", 1)
    async with open_client(face, proxy.dsn, sslmode="prefer") as client:
        assert await client.send("orders", 1) == 1


async def test_a_bad_dsn_is_refused_without_repeating_it(face: str) -> None:
    """The error must not hold a password."""
    with pytest.raises(ValidationError) as caught:
        open_client(face, "postgresql://user:secret@[host/db")
    assert "secret" not in str(caught.value) + repr(caught.value.fields())
    with pytest.raises(ValidationError, match="sslmodus"):
        open_client(face, "", sslmodus="require")


async def test_several_hosts_are_tried(face: str, orders: str, proxy: Proxy) -> None:
    """The first host of the DSN is dead, the second takes the connection."""
    given = psycopg.conninfo.conninfo_to_dict(proxy.dsn)
    with Proxy(orders) as dead:
        dead.refuse()
        port = psycopg.conninfo.conninfo_to_dict(dead.dsn)["port"]
        both = psycopg.conninfo.make_conninfo(
            **{**given, "host": "127.0.0.1,127.0.0.1", "port": f"{port},{given['port']}"}
        )
        async with open_client(face, both) as client:
            assert await client.send("orders", 1) == 1


async def test_a_pooler_that_refuses_options_is_met_without_them(
    face: str, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once refused, the client goes on without start-up options."""
    tried: list[str] = []
    for kind in (connections.Connection, connections.AsyncConnection):
        refuse_options(kind, tried, monkeypatch)
    async with open_client(face, orders, pool_size=2) as client:
        await asyncio.gather(client.send("orders", 1), client.send("orders", 2))
        async with client.transaction() as tx:
            assert (await tx.execute("show statement_timeout")).value() == "0"
    assert any("options" in one for one in tried)
    assert "options" not in tried[-1]


def refuse_options(kind: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a class of connections refuse `options`, as a pooler does."""
    connect = kind.connect

    def judge(conninfo: str) -> None:
        tried.append(conninfo)
        if "options" in conninfo:
            raise psycopg.OperationalError("FATAL:  unsupported startup parameter: options")

    def blocking(conninfo: str, **more: Any) -> Any:
        judge(conninfo)
        return connect(conninfo, **more)

    async def asynchronous(conninfo: str, **more: Any) -> Any:
        judge(conninfo)
        return await connect(conninfo, **more)

    monkeypatch.setattr(kind, "connect", asynchronous if kind is connections.AsyncConnection else blocking)


# Sends in the parent, then in a forked child, then in the parent again; prints who used which session.
FORK = """
import os, sys
from shared.pgmq.blocking import Client
client = Client(sys.argv[1], pool_size=1)
def session():
    with client.transaction() as tx:
        return tx.execute("select pg_backend_pid()").value()
before = session()
pid = os.fork()
if pid == 0:
    print("child", session() != before, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("parent", session() == before)
"""


def test_a_forked_child_gets_connections_of_its_own(orders: str) -> None:
    """The parent's sessions are neither used nor ended by a child."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, orders],
        cwd=Path(__file__).parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["child True", "parent True"], done.stderr


def test_threads_share_a_client(orders: str) -> None:
    """Sixteen threads on four connections: every message once."""
    with Client(orders, pool_size=4) as client:
        threads = [threading.Thread(target=lambda: [client.send("orders", 1) for _ in range(20)]) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert client.metrics("orders").length == 320

"""The client says what is known, and sends nothing twice: losses and delays at every moment, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from shared.errors import ConnectionLost, OperationTimeout, SupervisorError
from shared.pgmq import connecting
from shared.pgmq.sqlstate import OutcomeUnknown, WriteLate, WriteLost
from shared.pgmq.transaction import State
from tests.support.clients import FACES, open_client, until
from tests.support.proxy import Proxy


@pytest.fixture(params=FACES)
async def client(
    request: pytest.FixtureRequest, database: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """Give a client behind the proxy, whose answers have to come within about a second."""
    monkeypatch.setattr(connecting, "_SLACK_S", 0.2)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select pgmq.create('orders'); create table accounts (id integer primary key)")
    async with open_client(request.param, proxy.dsn, pool_size=1, statement_timeout="800ms") as made:
        yield made


def count(dsn: str, table: str) -> int:
    """Count rows beside the client."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(f"select count(*) from {table}").fetchone()
    assert row is not None
    number: int = row[0]
    return number


async def test_a_write_whose_answer_is_lost_is_unknown_and_not_sent_again(
    client: Any, database: str, proxy: Proxy
) -> None:
    """The message is there, nobody told us, and it is there once."""
    proxy.swallow_reply("pgmq.send(")
    with pytest.raises(WriteLost, match="outcome is unknown") as caught:
        await client.send("orders", 1)
    error = caught.value
    assert isinstance(error, ConnectionLost | OutcomeUnknown)
    assert (error.category, error.operation, error.retryable) == ("connection", "send", False)
    assert error.remedy
    assert (count(database, "pgmq.q_orders"), len(proxy.statements("pgmq.send("))) == (1, 1)
    assert await client.send("orders", 2) == 2


async def test_a_write_that_never_arrived_is_unknown_too(client: Any, database: str, proxy: Proxy) -> None:
    """From here it looks the same, so nothing else may be said."""
    proxy.cut_before("pgmq.send(")
    with pytest.raises(WriteLost):
        await client.send("orders", 1)
    assert (count(database, "pgmq.q_orders"), len(proxy.statements("pgmq.send("))) == (0, 1)


@pytest.mark.parametrize("operation", ["read", "pop", "delete", "archive", "set_vt", "create", "purge"])
async def test_every_write_is_unknown_when_its_answer_is_lost(client: Any, proxy: Proxy, operation: str) -> None:
    """Reading messages changes them too: it counts as a write."""
    sent = await client.send("orders", 1)
    calls: dict[str, tuple[Any, ...]] = {
        "delete": (sent,),
        "archive": (sent,),
        "set_vt": (sent, 5),
    }
    trap = proxy.swallow_reply("doomed" if operation == "purge" else f"pgmq.{operation}(")
    with pytest.raises(WriteLost) as caught:
        await getattr(client, operation)("orders", *calls.get(operation, ()))
    assert trap.sprung
    assert (caught.value.operation, caught.value.retryable) == (operation, False)


@pytest.mark.parametrize("operation", ["metrics", "list_queues", "capabilities"])
async def test_what_only_looks_may_be_asked_again(client: Any, proxy: Proxy, operation: str) -> None:
    """A lost answer of a read-only statement is retryable, but not retried by us."""
    texts = {"metrics": "pgmq.metrics(", "list_queues": "list_queues()", "capabilities": "pg_proc"}
    proxy.swallow_reply(texts[operation])
    arguments = ["orders"] if operation == "metrics" else []
    with pytest.raises(ConnectionLost, match="nothing was changed") as caught:
        await getattr(client, operation)(*arguments)
    assert caught.value.retryable
    assert not isinstance(caught.value, OutcomeUnknown)
    assert len(proxy.statements(texts[operation])) == 1
    await getattr(client, operation)(*arguments)


async def test_a_commit_whose_answer_is_lost_is_unknown(client: Any, database: str, proxy: Proxy) -> None:
    """All of it is there; the transaction is over, and its connection is free."""
    proxy.swallow_reply("commit")
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (1)")
        await tx.send("orders", 1)
        with pytest.raises(WriteLost, match="commit is unknown") as caught:
            await tx.commit()
        assert (caught.value.operation, caught.value.retryable) == ("commit", False)
        assert tx.state is State.UNKNOWN
        assert await client.send("orders", 2) == 2
    assert (count(database, "accounts"), len(proxy.statements("commit"))) == (1, 1)


async def test_a_commit_that_never_arrived_is_unknown_too(client: Any, database: str, proxy: Proxy) -> None:
    """The server rolls back; from here that cannot be told."""
    proxy.cut_before("commit")
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (1)")
        with pytest.raises(OutcomeUnknown):
            await tx.commit()
    assert count(database, "accounts") == 0


@pytest.mark.parametrize("statement", ["begin", "insert", "rollback"])
async def test_before_the_commit_a_lost_connection_means_rolled_back(
    client: Any, database: str, proxy: Proxy, statement: str
) -> None:
    """That is known, so the transaction as a whole may be tried again; a rollback cannot fail."""
    proxy.swallow_reply(statement)

    async def work() -> None:
        async with client.transaction() as tx:
            await tx.execute("insert into accounts values (1)")
            await tx.rollback()

    if statement == "rollback":
        await work()
    else:
        with pytest.raises(ConnectionLost, match="rolled back") as caught:
            await work()
        assert caught.value.retryable
    assert count(database, "accounts") == 0
    await work()


async def test_a_write_that_is_not_answered_in_time_is_unknown(client: Any, database: str, proxy: Proxy) -> None:
    """A network that freezes in mid-write: bounded, in doubt, and nothing goes out again after it thaws."""
    await client.metrics("orders")
    proxy.freeze_open()
    with pytest.raises(WriteLate, match="outcome is unknown") as caught:
        await client.send("orders", 1)
    assert (caught.value.category, caught.value.retryable) == ("timeout", False)
    proxy.thaw()
    await client.send("orders", 2)
    assert len(proxy.statements("pgmq.send(")) <= 2


async def test_a_look_that_is_not_answered_in_time_is_retryable(client: Any, proxy: Proxy) -> None:
    """Nothing was changed by it."""
    await client.metrics("orders")
    proxy.freeze_open()
    with pytest.raises(OperationTimeout, match="nothing was changed") as caught:
        await client.metrics("orders")
    assert caught.value.retryable


async def test_a_frozen_transaction_is_left_in_bounded_time(client: Any, database: str, proxy: Proxy) -> None:
    """The statement times out, leaving does not wait again, and the pool is free."""
    async with asyncio.timeout(15):
        async with client.transaction() as tx:
            await tx.execute("insert into accounts values (1)")
            proxy.freeze_open()
            with pytest.raises(OperationTimeout, match="rolled back"):
                await tx.execute("insert into accounts values (2)")
            assert tx.state is State.ROLLED_BACK
        assert await client.send("orders", 1) == 1
    proxy.cut()
    await until(lambda: count(database, "accounts") == 0)


async def test_a_slow_statement_is_ended_by_the_server_first(client: Any, proxy: Proxy) -> None:
    """statement_timeout answers in good order: not done, retryable, the same connection goes on."""
    await client.metrics("orders")
    async with client.transaction() as tx:
        with pytest.raises(OperationTimeout, match="was not done") as caught:
            await tx.execute("select pg_sleep(30)")
        assert (caught.value.sqlstate, caught.value.retryable) == ("57014", True)
    await client.metrics("orders")
    assert proxy.accepted == 1


async def test_a_slow_network_is_no_fault(client: Any, proxy: Proxy) -> None:
    """Delays below the limit only take their time."""
    proxy.delay_s = 0.02
    assert await client.send("orders", 1) == 1


async def test_a_crash_of_the_server_ends_what_was_open(client: Any, own_server: Any, request: Any) -> None:
    """An immediate stop under an open transaction: told, and after the restart the client goes on by itself."""
    face = request.node.callspec.params["client"]
    dsn = own_server.dsn()
    async with open_client(face, dsn) as other:
        async with other.transaction() as tx:
            await tx.execute("create table t (c integer)")
            own_server.stop("immediate")
            with pytest.raises(SupervisorError, match="rolled back"):
                await tx.execute("insert into t values (1)")
        with pytest.raises(ConnectionLost, match="nothing was sent"):
            await other.list_queues()
        own_server.start()
        async with other.transaction() as tx:
            assert (await tx.execute("select to_regclass('t')")).value() is None


class TestCancellation:
    """asyncio only: a task that is cancelled in mid-statement."""

    @pytest.fixture
    async def single(self, database: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
        """Give an asyncio client with one connection."""
        monkeypatch.setattr(connecting, "_SLACK_S", 0.2)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("select pgmq.create('orders'); create table accounts (id integer primary key)")
        async with open_client(
            "asyncio", proxy.dsn, pool_size=1, acquire_timeout="10s", statement_timeout="3s"
        ) as made:
            yield made

    async def test_the_statement_is_cancelled_on_the_server(self, single: Any, proxy: Proxy) -> None:
        """It ends there too, the transaction is rolled back, and the connection is used again."""

        async def work() -> None:
            async with single.transaction() as tx:
                await tx.execute("insert into accounts values (1)")
                await tx.execute("select pg_sleep(60)")

        task = asyncio.create_task(work())
        await until(lambda: proxy.statements("pg_sleep"))
        task.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await single.send("orders", 1) == 1
        assert proxy.accepted <= 2  # one for the cancellation

    async def test_waiting_for_a_connection_can_be_cancelled(self, single: Any) -> None:
        """The slot that was waited for is not lost."""
        async with single.transaction():
            waiting = asyncio.create_task(single.send("orders", 1))
            await until(lambda: single._core._port._slots._waiters)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert await single.send("orders", 2) == 1

    async def test_a_long_poll_can_be_cancelled(self, single: Any, proxy: Proxy) -> None:
        """Between two looks it holds nothing."""
        poll = asyncio.create_task(single.read_with_poll("orders", max_wait="60s", interval="30s"))
        await until(lambda: proxy.statements("pgmq.read("))
        assert await single.send("orders", 1, delay="1h") == 1
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll

    async def test_cancelling_behind_a_dead_network_is_bounded(self, single: Any, proxy: Proxy) -> None:
        """Neither the statement nor the way out waits for ever."""

        async def work() -> None:
            async with single.transaction() as tx:
                await tx.execute("insert into accounts values (1)")
                await tx.execute("select pg_sleep(60)")

        task = asyncio.create_task(work())
        await until(lambda: proxy.statements("pg_sleep"))
        proxy.freeze()
        task.cancel()
        async with asyncio.timeout(30):
            with pytest.raises((asyncio.CancelledError, SupervisorError)):
                await task
        proxy.cut()
        proxy.thaw()
        assert await single.send("orders", 1) == 1

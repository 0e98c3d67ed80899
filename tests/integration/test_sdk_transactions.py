"""The client: transactions, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from shared.errors import DatabaseError, OperationTimeout, ProtocolError, SupervisorError, ValidationError
from shared.pgmq.transaction import Isolation, State
from tests.support.clients import FACES, open_client


@pytest.fixture(params=FACES)
async def client(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Any]:
    """Give a client with one connection, the queue `orders` and the table `accounts`."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create table accounts (id integer primary key, balance integer not null)")
    async with open_client(request.param, database, pool_size=1, acquire_timeout="300ms") as made:
        await made.create("orders")
        yield made


def balances(dsn: str) -> list[Any]:
    """Read the business table beside the client."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute("select id, balance from accounts order by id").fetchall()


async def test_business_rows_and_messages_commit_together(client: Any, database: str) -> None:
    """Before the commit nobody sees either, after it both are there."""
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (%s, %s)", [1, 100])
        sent = await tx.send("orders", {"account": 1})
        assert balances(database) == []
        await tx.commit()
        assert tx.state is State.COMMITTED
    assert balances(database) == [(1, 100)]
    assert [message.msg_id for message in await client.read("orders")] == [sent]


async def test_leaving_without_a_commit_rolls_back(client: Any, database: str) -> None:
    """The end of the block is no commit."""
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (1, 1)")
        await tx.send("orders", 1)
    assert tx.state is State.ROLLED_BACK
    assert balances(database) == []
    assert await client.read("orders") == []


async def test_an_exception_rolls_back_and_passes(client: Any, database: str) -> None:
    """The caller's own exception is what comes out."""

    async def insert_and_fail() -> None:
        async with client.transaction() as tx:
            await tx.execute("insert into accounts values (1, 1)")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await insert_and_fail()
    assert balances(database) == []
    assert await client.send("orders", 1) == 1


async def test_an_explicit_rollback_undoes_a_read(client: Any) -> None:
    """Messages that were taken inside are visible again at once, uncounted."""
    await client.send("orders", 1)
    async with client.transaction() as tx:
        (taken,) = await tx.read("orders")
        assert taken.read_ct == 1
        await tx.rollback()
    (again,) = await client.read("orders")
    assert again.read_ct == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_the_connection_is_free_at_once(client: Any, end: str) -> None:
    """After the end, still inside the block, the only connection of the pool can be used; the transaction cannot."""
    async with client.transaction() as tx:
        await tx.execute("select 1")
        await getattr(tx, end)()
        assert await client.send("orders", 1) == 1
        for call in (lambda: tx.execute("select 1"), tx.commit, tx.rollback, lambda: tx.send("orders", 1)):
            with pytest.raises(ValidationError, match="nothing was sent"):
                await call()


async def test_a_transaction_holds_one_connection(client: Any) -> None:
    """Every statement runs in the same session; nobody else gets it meanwhile."""
    async with client.transaction() as tx:
        pids = {(await tx.execute("select pg_backend_pid()")).value() for _ in range(3)}
        assert len(pids) == 1
        with pytest.raises(OperationTimeout, match="nothing was sent") as caught:
            await client.send("orders", 1)
        assert (caught.value.operation, caught.value.retryable) == ("send", True)


async def test_a_transaction_is_entered_once(client: Any) -> None:
    """A second use is refused, and takes no connection."""
    transaction = client.transaction()
    async with transaction:
        pass
    with pytest.raises(ValidationError):
        async with transaction:
            pass
    assert await client.send("orders", 1) == 1


async def test_a_failed_statement_leaves_the_transaction_to_be_rolled_back(client: Any, database: str) -> None:
    """The error says which constraint; a commit after it says that nothing was committed."""
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (1, 1)")
        with pytest.raises(DatabaseError, match="duplicate key") as caught:
            await tx.execute("insert into accounts values (1, 2)")
        assert caught.value.sqlstate == "23505"
        assert "accounts_pkey" in caught.value.detail
        assert tx.state is State.OPEN
        with pytest.raises(DatabaseError, match="nothing was committed") as refused:
            await tx.commit()
        assert refused.value.sqlstate == "25P02"
        assert tx.state is State.ROLLED_BACK
    assert balances(database) == []


async def test_a_deferred_constraint_fails_at_the_commit(client: Any, database: str) -> None:
    """The server's answer is known: nothing was committed, and the connection lives on."""
    async with client.transaction() as tx:
        await tx.execute("alter table accounts add constraint twin unique (balance) deferrable initially deferred")
        await tx.execute("insert into accounts values (1, 1), (2, 1)")
        with pytest.raises(DatabaseError) as caught:
            await tx.commit()
        assert (caught.value.sqlstate, caught.value.operation) == ("23505", "commit")
    assert balances(database) == []
    assert await client.send("orders", 1) == 1


async def test_ending_the_transaction_by_sql_is_noticed(client: Any) -> None:
    """A COMMIT that was said as a statement is a fault of the caller, told at once."""
    async with client.transaction() as tx:
        with pytest.raises(ProtocolError, match="ended the transaction"):
            await tx.execute("commit")
        with pytest.raises(ValidationError, match="ended by a statement"):
            await tx.execute("select 1")
    assert await client.send("orders", 1) == 1


async def test_savepoints_are_plain_sql(client: Any, database: str) -> None:
    """A part can be undone."""
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (1, 1)")
        await tx.execute("savepoint part")
        with pytest.raises(DatabaseError):
            await tx.execute("insert into accounts values (1, 1)")
        await tx.execute("rollback to savepoint part")
        await tx.commit()
    assert balances(database) == [(1, 1)]


async def test_results_have_columns_rows_and_counts(client: Any) -> None:
    """Rows as tuples; what gives no rows has a count."""
    async with client.transaction() as tx:
        assert await tx.executemany("insert into accounts values (%s, %s)", [(1, 10), (2, 20)]) == 2
        changed = await tx.execute("update accounts set balance = balance + %(more)s", {"more": 1})
        assert (changed.row_count, changed.columns, len(changed)) == (2, (), 0)
        found = await tx.execute("select id, balance from accounts order by id")
        assert (found.columns, list(found)) == (("id", "balance"), [(1, 11), (2, 21)])
        with pytest.raises(ProtocolError, match="one row"):
            found.one()


async def test_a_bad_parameter_is_the_callers_fault(client: Any) -> None:
    """Placeholders without values, and values that no type can hold, are refused without harm to the transaction."""
    async with client.transaction() as tx:
        for query, parameters in (("select %s", []), ("select %s", ["a\x00b"]), ("select %(x)s", {"y": 1})):
            with pytest.raises(ValidationError):
                await tx.execute(query, parameters)
        assert (await tx.execute("select %s::text", ["ü%"])).value() == "ü%"
        await tx.commit()


async def test_an_answer_that_python_cannot_hold_is_told(client: Any) -> None:
    """The statement was done; its row has no value in Python."""
    async with client.transaction() as tx:
        with pytest.raises(ProtocolError, match="was done"):
            await tx.execute("select 'infinity'::timestamptz")
        assert (await tx.execute("select 1")).value() == 1


async def test_serialization_failures_are_retryable(client: Any, database: str, request: pytest.FixtureRequest) -> None:
    """The transaction as a whole may be tried again."""
    face = request.node.callspec.params["client"]
    async with open_client(face, database, pool_size=2) as two:
        async with two.transaction() as tx:
            await tx.execute("insert into accounts values (1, 1)")
            await tx.commit()
        async with two.transaction(isolation=Isolation.SERIALIZABLE) as tx:
            await tx.execute("select balance from accounts")
            async with two.transaction() as other:
                await other.execute("update accounts set balance = 2")
                await other.commit()
            with pytest.raises(DatabaseError) as caught:
                await tx.execute("update accounts set balance = 3")
            assert (caught.value.sqlstate, caught.value.retryable) == ("40001", True)


async def test_read_only_is_passed_on(client: Any) -> None:
    """Writing in a read-only transaction is refused by the server; a wrong isolation by us."""
    async with client.transaction(read_only=True) as tx:
        with pytest.raises(DatabaseError) as caught:
            await tx.send("orders", 1)
        assert caught.value.sqlstate == "25006"
    with pytest.raises(ValidationError, match="isolation"):
        async with client.transaction(isolation="sloppy"):
            pass
    assert await client.send("orders", 1) == 1


async def test_a_terminated_backend_ends_the_transaction(client: Any, database: str) -> None:
    """No reconnect inside: the statement fails, all is rolled back, and the pool has a new connection at once."""
    async with client.transaction() as tx:
        await tx.execute("insert into accounts values (1, 1)")
        pid = (await tx.execute("select pg_backend_pid()")).value()
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("select pg_terminate_backend(%s, 10000)", [pid])
        with pytest.raises(SupervisorError, match="rolled back") as caught:
            await tx.execute("insert into accounts values (2, 2)")
        assert (caught.value.category, caught.value.retryable) == ("connection", True)
        assert tx.state is State.ROLLED_BACK
        assert await client.send("orders", 1) == 1
        with pytest.raises(ValidationError):
            await tx.execute("select 1")
    assert balances(database) == []


async def test_a_limit_on_idleness_is_named(client: Any) -> None:
    """idle_in_transaction_session_timeout ends the session: the next statement says that nothing was committed."""
    async with client.transaction() as tx:
        await tx.execute("set local idle_in_transaction_session_timeout = '20ms'")
        connection = tx._core.pinned("test") if hasattr(tx, "_core") else tx._inner._core.pinned("test")
        await _readable(connection.pgconn.socket)
        with pytest.raises(SupervisorError, match="rolled back") as caught:
            await tx.execute("select 1")
        assert caught.value.retryable


async def _readable(descriptor: int) -> None:
    """Wait until a socket has something to read."""
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(descriptor, there.set)
    try:
        async with asyncio.timeout(20):
            await there.wait()
    finally:
        loop.remove_reader(descriptor)

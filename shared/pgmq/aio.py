"""The client for asyncio. What its methods mean stands in `operations`; here they are carried out, awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import psycopg
from psycopg.abc import Params

from shared.pgmq import operations
from shared.pgmq.arguments import Duration, Filter
from shared.pgmq.capabilities import Capabilities
from shared.pgmq.connecting import settings
from shared.pgmq.connections import AsyncConnection
from shared.pgmq.core import ClientCore
from shared.pgmq.faces import describe
from shared.pgmq.messages import Message
from shared.pgmq.operations import Request
from shared.pgmq.port import Query
from shared.pgmq.results import Result
from shared.pgmq.transaction import Isolation, State, TransactionCore

__all__ = ["AsyncClient", "AsyncTransaction"]

P = ParamSpec("P")
T = TypeVar("T")


class _Tasks:
    """The port: every step suspends its task."""

    def __init__(self, slots: int) -> None:
        self._size = slots
        self._closing = asyncio.Event()
        self._slots = asyncio.Semaphore(slots)

    async def acquire_slot(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._slots.acquire()
        except TimeoutError:
            return False

    def release_slot(self) -> None:
        self._slots.release()

    def renew_slots(self) -> None:
        self._slots = asyncio.Semaphore(self._size)

    async def connect(self, conninfo: str) -> AsyncConnection:
        # No prepared statements: behind a pooler they belong to somebody else's session.
        return await AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)

    async def execute(
        self, connection: AsyncConnection, query: Query, parameters: Params | None
    ) -> psycopg.AsyncCursor[tuple[Any, ...]]:
        return await connection.execute(query, parameters)

    async def execute_many(
        self, connection: AsyncConnection, query: Query, parameters: Sequence[Params]
    ) -> psycopg.AsyncCursor[tuple[Any, ...]]:
        cursor = connection.cursor()
        await cursor.executemany(query, parameters)
        return cursor

    async def rows(self, cursor: psycopg.AsyncCursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return await cursor.fetchall()

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def wake(self) -> None:
        self._closing.set()


def _method(build: Callable[P, Request[T]]) -> Callable[Concatenate[_Operations, P], Coroutine[Any, Any, T]]:
    async def method(self: _Operations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(build(*args, **kwargs))

    return describe(method, build)


class _Operations:
    """What can be said to queues, inside a transaction and outside."""

    create = _method(operations.create)
    create_unlogged = _method(operations.create_unlogged)
    create_partitioned = _method(operations.create_partitioned)
    drop = _method(operations.drop)
    list_queues = _method(operations.list_queues)
    metrics = _method(operations.metrics)
    metrics_all = _method(operations.metrics_all)
    send = _method(operations.send)
    send_batch = _method(operations.send_batch)
    read = _method(operations.read)
    pop = _method(operations.pop)
    set_vt = _method(operations.set_vt)
    set_vt_batch = _method(operations.set_vt_batch)
    archive = _method(operations.archive)
    archive_batch = _method(operations.archive_batch)
    delete = _method(operations.delete)
    delete_batch = _method(operations.delete_batch)

    async def _run(self, request: Request[T]) -> T:
        raise NotImplementedError


class AsyncTransaction(_Operations):
    """One transaction on one connection: `async with client.transaction() as tx:`. For one task.

    Leaving the block without `commit()` rolls back. Either way the connection is free at once, inside the block too.
    """

    def __init__(self, core: TransactionCore[AsyncConnection]) -> None:
        """Made by `AsyncClient.transaction`."""
        self._core = core

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._core.state

    @property
    def connection(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        """The driver's connection, for COPY, cursors and libraries; its errors come as the driver's own."""
        return self._core.pinned("connection")

    async def execute(self, query: Query, parameters: Params | None = None) -> Result:
        """Say a statement of your own. Values belong into `parameters` (`%s` or `%(name)s`)."""
        return await self._core.execute(query, parameters)

    async def executemany(self, query: Query, parameters: Sequence[Params]) -> int:
        """Say a statement once for each set of parameters; gives the number of rows changed."""
        return await self._core.execute_many(query, parameters)

    async def commit(self) -> None:
        """Commit. Raises `OutcomeUnknown` where the answer was lost: it may have happened."""
        await self._core.commit()

    async def rollback(self) -> None:
        """Roll back."""
        await self._core.rollback()

    async def __aenter__(self) -> Self:
        """Begin."""
        await self._core.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Roll back what was not committed."""
        await self._core.leave()

    async def _run(self, request: Request[T]) -> T:
        return await self._core.run(request)


class AsyncClient(_Operations):
    """Sends to and reads from PGMQ's queues. For the tasks of one event loop; connects when it is first needed.

    `dsn` and `libpq` are libpq's (`sslmode=`, `sslrootcert=`, `target_session_attrs=`, `service=`, ...), and pass
    through. Times are seconds, timedeltas or "30s"; a `statement_timeout` of None or "none" waits for ever.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        pool_size: int = 8,
        acquire_timeout: Duration = "30s",
        connect_timeout: Duration = "10s",
        statement_timeout: Duration | None = "30s",
        application_name: str = "pgmq-client",
        **libpq: str | int,
    ) -> None:
        """Raise `ValidationError` for what cannot be; connect to nothing yet."""
        checked = settings(
            dsn,
            libpq,
            pool_size=pool_size,
            acquire_timeout=acquire_timeout,
            connect_timeout=connect_timeout,
            statement_timeout=statement_timeout,
            application_name=application_name,
        )
        self._core: ClientCore[AsyncConnection] = ClientCore(checked, _Tasks(pool_size))

    def transaction(self, *, isolation: Isolation | str | None = None, read_only: bool = False) -> AsyncTransaction:
        """Begin a transaction with `async with`; see `AsyncTransaction`."""
        return AsyncTransaction(self._core.transaction(isolation, read_only=read_only))

    async def read_with_poll(
        self,
        queue: str,
        *,
        visibility_timeout: Duration = 30,
        quantity: int = 1,
        where: Filter | None = None,
        max_wait: Duration = "5s",
        interval: Duration = "100ms",
    ) -> list[Message]:
        """Read, and while there is nothing read again, at most for `max_wait`; gives an empty list then.

        Between two looks no connection is held. `close()` from another task ends the wait with `ValidationError`.
        """
        return await self._core.read_with_poll(
            queue,
            visibility_timeout=visibility_timeout,
            quantity=quantity,
            where=where,
            max_wait=max_wait,
            interval=interval,
        )

    async def purge(self, queue: str, *, batch: int = 1000) -> int:
        """Delete what is not in flight, batch by batch, each committed; gives how many went."""
        return await self._core.purge(queue, batch)

    async def capabilities(self, *, refresh: bool = False) -> Capabilities:
        """Tell what server and PGMQ can do; asked once and remembered."""
        return await self._core.capabilities(refresh=refresh)

    async def close(self) -> None:
        """Close every idle connection; what is in use is closed when it is given back."""
        self._core.close()

    async def __aenter__(self) -> Self:
        """Connect to nothing yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def _run(self, request: Request[T]) -> T:
        return await self._core.run(request)

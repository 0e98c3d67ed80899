"""The client for threads. What its methods mean stands in `operations`; here they are carried out, blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import psycopg
from psycopg.abc import Params

from shared.pgmq import operations
from shared.pgmq.arguments import Duration, Filter
from shared.pgmq.capabilities import Capabilities
from shared.pgmq.connecting import settings
from shared.pgmq.connections import Connection
from shared.pgmq.core import ClientCore
from shared.pgmq.faces import describe
from shared.pgmq.messages import Message
from shared.pgmq.operations import Request
from shared.pgmq.port import Query
from shared.pgmq.results import Result
from shared.pgmq.transaction import Isolation, State, TransactionCore

__all__ = ["Client", "Transaction"]

P = ParamSpec("P")
T = TypeVar("T")


class _Threads:
    """The port: every step blocks, none suspends."""

    def __init__(self, slots: int) -> None:
        self._size = slots
        self._closing = threading.Event()
        self._slots = threading.Semaphore(slots)

    async def acquire_slot(self, timeout_s: float) -> bool:
        return self._slots.acquire(timeout=timeout_s)

    def release_slot(self) -> None:
        self._slots.release()

    def renew_slots(self) -> None:
        self._slots = threading.Semaphore(self._size)

    async def connect(self, conninfo: str) -> Connection:
        # No prepared statements: behind a pooler they belong to somebody else's session.
        return Connection.connect(conninfo, autocommit=True, prepare_threshold=None)

    async def execute(
        self, connection: Connection, query: Query, parameters: Params | None
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        return connection.execute(query, parameters)

    async def execute_many(
        self, connection: Connection, query: Query, parameters: Sequence[Params]
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        cursor = connection.cursor()
        cursor.executemany(query, parameters)
        return cursor

    async def rows(self, cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return cursor.fetchall()

    async def pause(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def wake(self) -> None:
        self._closing.set()


def _do(work: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine through: with a port that blocks it never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    work.close()
    raise AssertionError("a blocking step has suspended")


def _method(build: Callable[P, Request[T]]) -> Callable[Concatenate[_Operations, P], T]:
    def method(self: _Operations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(build(*args, **kwargs))

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

    def _run(self, request: Request[T]) -> T:
        raise NotImplementedError


class Transaction(_Operations):
    """One transaction on one connection: `with client.transaction() as tx:`. For one thread.

    Leaving the block without `commit()` rolls back. Either way the connection is free at once, inside the block too.
    """

    def __init__(self, core: TransactionCore[Connection]) -> None:
        """Made by `Client.transaction`."""
        self._core = core

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._core.state

    @property
    def connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        """The driver's connection, for COPY, cursors and libraries; its errors come as the driver's own."""
        return self._core.pinned("connection")

    def execute(self, query: Query, parameters: Params | None = None) -> Result:
        """Say a statement of your own. Values belong into `parameters` (`%s` or `%(name)s`)."""
        return _do(self._core.execute(query, parameters))

    def executemany(self, query: Query, parameters: Sequence[Params]) -> int:
        """Say a statement once for each set of parameters; gives the number of rows changed."""
        return _do(self._core.execute_many(query, parameters))

    def commit(self) -> None:
        """Commit. Raises `OutcomeUnknown` where the answer was lost: it may have happened."""
        _do(self._core.commit())

    def rollback(self) -> None:
        """Roll back."""
        _do(self._core.rollback())

    def __enter__(self) -> Self:
        """Begin."""
        _do(self._core.enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Roll back what was not committed."""
        _do(self._core.leave())

    def _run(self, request: Request[T]) -> T:
        return _do(self._core.run(request))


class Client(_Operations):
    """Sends to and reads from PGMQ's queues. May be shared by threads; connects when it is first needed.

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
        self._core: ClientCore[Connection] = ClientCore(checked, _Threads(pool_size))

    def transaction(self, *, isolation: Isolation | str | None = None, read_only: bool = False) -> Transaction:
        """Begin a transaction with `with`; see `Transaction`."""
        return Transaction(self._core.transaction(isolation, read_only=read_only))

    def read_with_poll(
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

        Between two looks no connection is held. `close()` from another thread ends the wait with `ValidationError`.
        """
        return _do(
            self._core.read_with_poll(
                queue,
                visibility_timeout=visibility_timeout,
                quantity=quantity,
                where=where,
                max_wait=max_wait,
                interval=interval,
            )
        )

    def purge(self, queue: str, *, batch: int = 1000) -> int:
        """Delete what is not in flight, batch by batch, each committed; gives how many went."""
        return _do(self._core.purge(queue, batch))

    def capabilities(self, *, refresh: bool = False) -> Capabilities:
        """Tell what server and PGMQ can do; asked once and remembered."""
        return _do(self._core.capabilities(refresh=refresh))

    def close(self) -> None:
        """Close every idle connection; what is in use is closed when it is given back."""
        self._core.close()

    def __enter__(self) -> Self:
        """Connect to nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _run(self, request: Request[T]) -> T:
        return _do(self._core.run(request))

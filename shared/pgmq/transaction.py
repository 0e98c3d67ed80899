"""A transaction without its face: one connection, pinned from BEGIN to the end; no reconnect and no retry inside."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from enum import StrEnum
from typing import Final, Generic, TypeVar

from psycopg.abc import Params
from psycopg.pq import TransactionStatus

from shared.errors import DatabaseError, ProtocolError, SupervisorError, ValidationError
from shared.pgmq.connections import C, attempt, decoding
from shared.pgmq.operations import Request
from shared.pgmq.pool import Pool
from shared.pgmq.port import Cursor, Port, Query
from shared.pgmq.results import Result
from shared.pgmq.sqlstate import Moment, OutcomeUnknown

__all__ = ["Isolation", "State", "TransactionCore", "begin"]

T = TypeVar("T")
_ROLLBACK_LIMIT_S: Final = 5.0


class Isolation(StrEnum):
    """How much of others a transaction sees."""

    READ_COMMITTED = "read committed"
    REPEATABLE_READ = "repeatable read"
    SERIALIZABLE = "serializable"


class State(StrEnum):
    """Where a transaction stands. Only an open one has a connection."""

    NEW = "not begun"
    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "over, its commit in doubt"
    ENDED_BY_SQL = "over, ended by a statement"


def begin(isolation: Isolation | str | None, *, read_only: bool) -> bytes:
    """Compose BEGIN. Raises `ValidationError` for an isolation that there is none of."""
    text = "begin"
    if isolation is not None:
        try:
            text += f" isolation level {Isolation(isolation)}"
        except ValueError as error:
            raise ValidationError(
                f"there is no isolation level {isolation!r:.40}", remedy=", ".join(level.value for level in Isolation)
            ) from error
    return (text + " read only" * read_only).encode()


class TransactionCore(Generic[C]):
    """Begun by `enter`, ended by `commit`, `rollback`, a lost connection, or `leave`, which rolls back."""

    def __init__(self, pool: Pool[C], port: Port[C], statement: bytes, limit_s: float | None) -> None:
        """Take no connection yet."""
        self._pool = pool
        self._port = port
        self._begin = statement
        self._limit_s = limit_s
        self._connection: C | None = None
        self.state = State.NEW

    async def enter(self) -> None:
        """Take a connection and begin."""
        if self.state is not State.NEW:
            raise ValidationError(f"the transaction is {self.state}; nothing was sent", operation="begin")
        connection = await self._pool.acquire("begin")
        try:
            with attempt(connection, "begin", Moment.TRANSACTION, self._limit_s):
                await self._port.execute(connection, self._begin, None)
        except BaseException:
            self._pool.release(connection)
            raise
        self._connection = connection
        self.state = State.OPEN

    def pinned(self, operation: str) -> C:
        """Give the connection. Raises `ValidationError` where the transaction is not open."""
        if self._connection is None:
            raise ValidationError(f"the transaction is {self.state}; nothing was sent", operation=operation)
        return self._connection

    async def run(self, request: Request[T]) -> T:
        """Carry out an operation on queues."""
        connection = self.pinned(request.operation)
        work = self._port.execute(connection, request.statement, request.parameters)
        cursor = await self._say(request.operation, work, of_pgmq=True)
        with decoding(request.operation):
            rows = await self._port.rows(cursor)
        return request.answer(rows)

    async def execute(self, query: Query, parameters: Params | None) -> Result:
        """Carry out a statement of the caller's own."""
        work = self._port.execute(self.pinned("execute"), query, parameters)
        cursor = await self._say("execute", work)
        if cursor.description is None:
            return Result((), (), cursor.rowcount)
        with decoding("execute"):
            rows = await self._port.rows(cursor)
        return Result(tuple(column.name for column in cursor.description), tuple(rows), cursor.rowcount)

    async def execute_many(self, query: Query, parameters: Sequence[Params]) -> int:
        """Carry out a statement of the caller's own many times; gives the number of rows changed."""
        work = self._port.execute_many(self.pinned("executemany"), query, parameters)
        return (await self._say("executemany", work)).rowcount

    async def commit(self) -> None:
        """Commit. Raises `OutcomeUnknown` where no answer came, `DatabaseError` where nothing was committed."""
        connection = self.pinned("commit")
        try:
            with attempt(connection, "commit", Moment.COMMIT, self._limit_s):
                cursor = await self._port.execute(connection, b"commit", None)
        except SupervisorError as error:
            self._end(State.UNKNOWN if isinstance(error, OutcomeUnknown) else State.ROLLED_BACK)
            raise
        except BaseException:
            self._end(State.UNKNOWN)
            raise
        # The server answers ROLLBACK to the COMMIT of a transaction in which something had failed.
        committed = cursor.statusmessage == "COMMIT"
        self._end(State.COMMITTED if committed else State.ROLLED_BACK)
        if not committed:
            raise DatabaseError(
                "nothing was committed: an earlier statement of the transaction had failed",
                operation="commit",
                sqlstate="25P02",
                remedy="leave the transaction when a statement fails, or use a savepoint",
            )

    async def rollback(self) -> None:
        """Roll back. A connection that is gone has done so already: this does not fail."""
        connection = self.pinned("rollback")
        try:
            with attempt(connection, "rollback", Moment.TRANSACTION, _ROLLBACK_LIMIT_S):
                await self._port.execute(connection, b"rollback", None)
        except SupervisorError:
            pass
        finally:
            self._end(State.ROLLED_BACK)

    async def leave(self) -> None:
        """Roll back what was not committed."""
        if self._connection is not None:
            await self.rollback()

    async def _say(self, operation: str, work: Awaitable[Cursor], *, of_pgmq: bool = False) -> Cursor:
        try:
            with attempt(self.pinned(operation), operation, Moment.TRANSACTION, self._limit_s, of_pgmq=of_pgmq):
                cursor = await work
        except BaseException:
            self._look()
            raise
        self._look()
        if self.state is State.ENDED_BY_SQL:
            raise ProtocolError(
                "the statement ended the transaction", operation=operation, remedy="use commit() and rollback()"
            )
        return cursor

    def _look(self) -> None:
        """See after a statement whether the transaction goes on; give the connection back at once where it does not."""
        assert self._connection is not None
        match self._connection.pgconn.transaction_status:
            case TransactionStatus.INTRANS | TransactionStatus.INERROR:
                pass
            case TransactionStatus.IDLE:
                self._end(State.ENDED_BY_SQL)
            case _:
                self._end(State.ROLLED_BACK)

    def _end(self, state: State) -> None:
        connection, self._connection = self._connection, None
        self.state = state
        if connection is not None:
            self._pool.release(connection)

"""Sessions: a connection that is made when it is needed and replaced when it broke; and a pool of them."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import psycopg

from shared.errors import ConnectionLost, OperationTimeout
from supervisor.database.connections import Connection, Connections, Detached, Late
from supervisor.database.failures import translate
from supervisor.telemetry.facts import DatabaseReconnected, Fact

__all__ = ["SLACK_S", "Pool", "Session", "Work"]

Result = TypeVar("Result")
Work = Callable[[Connection], Coroutine[Any, Any, Result]]

# Above the server's own statement_timeout: normally the server answers first, and the connection lives on.
SLACK_S: Final = 5.0
_NOT_OURS: Final = frozenset({"26000", "42P05"})  # no such prepared statement; there is one already
# The server's answer to a plan whose columns are others now: a code that says little, from a function that says all.
_UNSUPPORTED: Final = "0A000"
_CHECKS_OUTDATED_PLANS: Final = "RevalidateCachedQuery"
_FAREWELLS: Final = 4  # pieces of it: a notice, a changed parameter, the last words, the end


class Session:
    """One connection for one user at a time. It tries once each time it is asked: backing off is the caller's."""

    def __init__(self, connections: Connections, role: str, detached: Detached, tell: Callable[[Fact], None]) -> None:
        self._connections = connections
        self._role = role
        self._detached = detached
        self._tell = tell
        self._connection: Connection | None = None
        self._had_one = False

    async def run(self, operation: str, work: Work[Result], timeout_s: float | None = None) -> Result:
        """Do `work`, which speaks to the database, within `timeout_s` (None: the statement timeout and some slack).

        Raises a `SupervisorError`. After `ConnectionLost` and `OperationTimeout` the next call may connect anew.
        """
        if timeout_s is None:
            timeout_s = self._connections.options.statement_timeout_s + SLACK_S
        connection = await self._usable(timeout_s)
        try:
            return await self._detached.within(connection, work(connection), timeout_s)
        except asyncio.CancelledError:
            self._connection = None  # put down by `within`
            raise
        except Late as error:
            self._connection = None
            raise translate(error, operation) from error
        except Exception as error:  # the driver's errors, and whatever its decoding raises: mapped, never passed on
            translated = translate(error, operation)
            if isinstance(translated, ConnectionLost) or connection.closed or self._is_prepared_no_more(error):
                self.drop()
                if not isinstance(translated, ConnectionLost):
                    translated = ConnectionLost(translated.message, operation=operation, sqlstate=translated.sqlstate)
            raise translated from error

    def _is_prepared_no_more(self, error: Exception) -> bool:
        """Whether a prepared statement was not carried out, because of what is prepared in this session."""
        if not isinstance(error, psycopg.Error):
            return False
        if error.sqlstate in _NOT_OURS:
            self._connections.give_up_prepared()
            return True
        return error.diag.source_function == _CHECKS_OUTDATED_PLANS and error.sqlstate == _UNSUPPORTED

    async def _usable(self, timeout_s: float) -> Connection:
        connection = self._connection
        if connection is not None:
            if not connection.closed and not _has_ended(connection):
                return connection
            self.drop()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connections.connect(self._role)
        except TimeoutError as error:
            raise OperationTimeout("no connection in time", operation="connect") from error
        self._connection = connection
        if self._had_one:
            self._tell(DatabaseReconnected(self._role))
        self._had_one = True
        return connection

    def drop(self) -> None:
        """Close the connection now; the next use makes another."""
        if self._connection is not None:
            self._detached.discard(self._connection)
            self._connection = None


def _has_ended(connection: Connection) -> bool:
    """Look at an idle connection before it is used: what was ended meanwhile is replaced, and no statement is lost.

    Nothing is sent. What can be read on an idle connection is the server's farewell, or its end.
    """
    pgconn = connection.pgconn
    try:
        waiting = select.poll()
        waiting.register(pgconn.socket, select.POLLIN)
        for _ in range(_FAREWELLS):
            if not waiting.poll(0):
                break
            pgconn.consume_input()
    except (psycopg.Error, OSError):
        return True
    return bool(pgconn.status == psycopg.pq.ConnStatus.BAD)


class Pool:
    """At most `size` sessions for whoever needs one, first come, first served; the last used goes out first."""

    def __init__(
        self, connections: Connections, size: int, detached: Detached, tell: Callable[[Fact], None], role: str = "work"
    ) -> None:
        assert size > 0
        self._options = connections.options
        self._sessions = [Session(connections, role, detached, tell) for _ in range(size)]
        self._idle = list(self._sessions)
        self._waiting: deque[asyncio.Future[Session]] = deque()

    async def run(self, operation: str, work: Work[Result], timeout_s: float | None = None) -> Result:
        """Like `Session.run`, on the first session that is free. No free one in time: nothing was sent."""
        session = await self._acquire(operation)
        try:
            return await session.run(operation, work, timeout_s)
        finally:
            self._release(session)

    async def _acquire(self, operation: str) -> Session:
        if self._idle:
            return self._idle.pop()
        free: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._waiting.append(free)
        try:
            await asyncio.wait({free}, timeout=self._options.acquire_timeout_s)
        except asyncio.CancelledError:
            if free.done():
                self._release(free.result())
            else:
                free.cancel()
            raise
        if free.done():
            return free.result()
        free.cancel()
        raise OperationTimeout("no session was free in time", operation=operation)

    def _release(self, session: Session) -> None:
        while self._waiting:
            free = self._waiting.popleft()
            if not free.done():
                free.set_result(session)
                return
        self._idle.append(session)

    def close(self) -> None:
        """Drop every connection."""
        for session in self._sessions:
            session.drop()

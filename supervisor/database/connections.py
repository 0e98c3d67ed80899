"""The one place that makes connections: names, keepalives, limits, and the way around poolers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg import conninfo

from shared.errors import ConfigurationError, ConnectionLost
from shared.pgmq.libpq import KEEPALIVE, refuses_options, with_settings
from supervisor.database.failures import connect_remedy, translate

__all__ = ["Connection", "ConnectionOptions", "Connections", "Detached", "Late", "connect_blocking"]

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
Result = TypeVar("Result")

_MISLEADING: Final = (
    "enable_seqscan",
    "enable_bitmapscan",
    "enable_sort",
    "enable_hashjoin",
    "enable_mergejoin",
)
_PREPARED_ON_REQUEST: Final = 1_000_000_000  # uses of a statement until the driver prepares it by itself
_CANCEL_WAIT_S: Final = 2.0
_CLOSE_WAIT_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Limits in seconds. The DSN's own parameters win over all of this but the encoding."""

    connect_timeout_s: float = 10.0
    statement_timeout_s: float = 30.0
    acquire_timeout_s: float = 30.0
    lock_timeout_s: float | None = None
    application_name: str = "pgmq-supervisor"


class Connections:
    """Makes sessions for one DSN. After a pooler refused start-up parameters it goes on without them."""

    def __init__(self, dsn: str, options: ConnectionOptions) -> None:
        """Raise `ConfigurationError` where the DSN cannot be read."""
        self._options = options
        self._given = _parse(dsn)
        self._without_options = False
        self._without_prepared = False

    @property
    def options(self) -> ConnectionOptions:
        """What the connections are made with."""
        return self._options

    async def connect(self, role: str) -> Connection:
        """Make one connection in autocommit. Raises `ConnectionLost`."""
        try:
            return await self._connect(role)
        except ConnectionLost as error:
            if self._without_options or not refuses_options(error.message):
                raise
        self._without_options = True
        return await self._connect(role)

    async def _connect(self, role: str) -> Connection:
        parameters = _parameters(self._given, self._options, role, plain=self._without_options)
        try:
            # Several hosts are tried one after the other, each with its own connect_timeout.
            hosts = str(parameters.get("host", "")).count(",") + 1
            async with asyncio.timeout(self._options.connect_timeout_s * hosts + 1.0):
                connection = await psycopg.AsyncConnection.connect(
                    "", autocommit=True, prepare_threshold=None, **parameters
                )
                await self._allow_prepared(connection)
                return connection
        except (psycopg.Error, OSError, TimeoutError) as error:
            raise _lost(error) from error

    async def _allow_prepared(self, connection: Connection) -> None:
        """Let statements that ask for it be prepared where the session is ours alone.

        Behind a transaction pooler they would belong to somebody else's session; it makes up the pid that it greets
        with. Without our settings a plan might be one for an empty queue.
        """
        if self._without_options or self._without_prepared:
            return
        try:
            cursor = await connection.execute("select pg_backend_pid()")
            if await cursor.fetchone() == (connection.info.backend_pid,):
                connection.prepare_threshold = _PREPARED_ON_REQUEST
        except BaseException:
            connection.pgconn.finish()  # nobody has it yet who could
            raise

    def give_up_prepared(self) -> None:
        """A prepared statement was not there, or not ours: something stands between after all."""
        self._without_prepared = True


def connect_blocking(dsn: str, options: ConnectionOptions, role: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Make one blocking connection in autocommit, for the command line. Raises `ConnectionLost`."""
    given = _parse(dsn)
    last: Exception | None = None
    for plain in (False, True):
        try:
            parameters = _parameters(given, options, role, plain=plain)
            return psycopg.connect("", autocommit=True, prepare_threshold=None, **parameters)
        except (psycopg.Error, OSError) as error:
            last = error
            if not refuses_options(str(error)):
                break
    assert last is not None
    raise _lost(last) from last


def _lost(error: Exception) -> ConnectionLost:
    translated = translate(error, "connect")
    return ConnectionLost(
        translated.message,
        operation="connect",
        sqlstate=translated.sqlstate,
        remedy=connect_remedy(translated.message) or "look whether the DSN is right and the server is up",
    )


def _parse(dsn: str) -> dict[str, Any]:
    try:
        return dict(conninfo.conninfo_to_dict(dsn))
    except psycopg.ProgrammingError as error:
        # libpq's text may repeat the DSN, with its password.
        raise ConfigurationError(
            "the DSN cannot be read", operation="connect", remedy="postgresql://user:password@host:5432/database"
        ) from error


def _parameters(given: dict[str, Any], options: ConnectionOptions, role: str, *, plain: bool) -> dict[str, Any]:
    """Merge the DSN with our defaults; `plain` leaves out what poolers refuse."""
    parameters: dict[str, Any] = {
        "application_name": f"{options.application_name} {role}",
        "connect_timeout": str(max(2, round(options.connect_timeout_s))),
        **KEEPALIVE,
        **given,
        "client_encoding": "utf8",
    }
    if not plain:
        timeout_ms = round(options.statement_timeout_s * 1000)
        settings: dict[str, str | int] = {
            "statement_timeout": timeout_ms,
            "idle_in_transaction_session_timeout": timeout_ms,
            # Compiling a claim costs more than running it, and bad estimates of a busy table ask for it.
            "jit": "off",
            # A plan may have been made while the queue was empty, when reading it whole and sorting seemed cheapest.
            **dict.fromkeys(_MISLEADING, "off"),
        }
        if options.lock_timeout_s is not None:
            settings["lock_timeout"] = round(options.lock_timeout_s * 1000)
        parameters["options"] = with_settings(settings, given.get("options"))
    return parameters


class Late(TimeoutError):
    """Work was not done in time; its connection is being put down and must not be used again."""


class Detached:
    """Runs work on a connection with a bound that holds whatever the network does.

    Cancelling the driver's coroutine is not enough: it asks the server to cancel and waits for the answer, which does
    not come through a dead network. What is late is left to a task of its own, which asks for the cancellation, waits
    a moment, and then shuts the socket down.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: set[Connection] = set()

    async def within(self, connection: Connection, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Wait for `work`, at most `timeout_s`; then raise `Late`."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, timeout_s))
        except asyncio.CancelledError:
            self._put_down(connection, task)
            raise
        if done:
            return task.result()
        self._put_down(connection, task)
        raise Late

    def discard(self, connection: Connection) -> None:
        """Close a connection, without waiting; one that is being put down is left to that."""
        if connection in self._ending:
            return
        with contextlib.suppress(psycopg.Error, OSError):
            connection.pgconn.finish()

    def _put_down(self, connection: Connection, work: asyncio.Future[Any]) -> None:
        self._ending.add(connection)
        task = asyncio.create_task(_end(connection, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._ending.discard(connection))

    async def close(self) -> None:
        """Wait a moment for what is still being put down, then let go of it: a dead network must not hold up a stop."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_WAIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(connection: Connection, work: asyncio.Future[Any]) -> None:
    """Cancel on the server, then end the connection under the work."""
    cancel = asyncio.ensure_future(connection.cancel_safe(timeout=_CANCEL_WAIT_S))
    try:
        await asyncio.wait({cancel, work}, timeout=_CANCEL_WAIT_S, return_when=asyncio.ALL_COMPLETED)
        if not work.done():
            _shut_down(connection)
            await asyncio.wait({work}, timeout=_CANCEL_WAIT_S)
    finally:
        for future in (cancel, work):
            if future.done() and not future.cancelled():
                future.exception()  # looked at, so that nobody complains that it never was
            else:
                future.cancel()
        _shut_down(connection)
        with contextlib.suppress(psycopg.Error, OSError):
            connection.pgconn.finish()


def _shut_down(connection: Connection) -> None:
    """Wake the reader up with an end of file; closing the descriptor under the event loop would not wake it."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.pgconn.socket)) as end:
        end.shutdown(socket.SHUT_RDWR)

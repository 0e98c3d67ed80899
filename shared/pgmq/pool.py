"""A bounded pool: connections are made when they are needed, by whoever needs them, who hears what went wrong.

A slot is a permit to have a connection out. Whoever holds one takes an idle connection that lives, or makes one. A
connection that cannot be used again is closed where it is given back, and another is made only when it is needed.
"""

from __future__ import annotations

import os
from typing import Final, Generic

import psycopg

from shared.errors import ConnectionLost, OperationTimeout, SupervisorError, ValidationError
from shared.pgmq.connecting import Settings
from shared.pgmq.connections import PING_TIMEOUT_S, C, Idle, attempt, close, is_reusable
from shared.pgmq.libpq import refuses_options
from shared.pgmq.port import Port
from shared.pgmq.sqlstate import Moment, translate
from shared.pgmq.statements import server

__all__ = ["Pool"]

_CONNECT: Final = "connect"


class Pool(Generic[C]):
    """At most `pool_size` connections. A forked child starts with an empty one: its parent's are not its own."""

    def __init__(self, settings: Settings, port: Port[C]) -> None:
        """Connect to nothing yet."""
        self._settings = settings
        self._port = port
        self._idle: Idle[C] = Idle()
        self._pid = os.getpid()
        self._closed = False
        self._plain = False

    async def acquire(self, operation: str) -> C:
        """Give a connection that was alive just now.

        Raises `OperationTimeout` and `ConnectionLost`, and `ValidationError` once the client is closed; each time
        nothing was sent.
        """
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._idle = Idle()
            self._port.renew_slots()
        self._refuse_closed(operation)
        if not await self._port.acquire_slot(self._settings.acquire_timeout_s):
            # Failure model: pool exhausted beyond acquire_timeout.
            raise OperationTimeout(
                f"none of {self._settings.pool_size} connections was free within "
                f"{self._settings.acquire_timeout_s:g} s; nothing was sent",
                operation=operation,
                remedy="raise pool_size or acquire_timeout, or hold transactions for less time",
                retryable=True,
            )
        try:
            self._refuse_closed(operation)
            return await self._usable() or await self._connect()
        except BaseException:
            self._port.release_slot()
            raise

    def release(self, connection: C) -> None:
        """Take a connection back, or close it where it cannot be used again. Never waits."""
        if is_reusable(connection) and not self._closed:
            self._idle.put(connection)
        else:
            close(connection)
        self._port.release_slot()
        if self._closed:
            self._idle.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it comes back."""
        self._closed = True
        self._idle.close()

    def _refuse_closed(self, operation: str) -> None:
        if self._closed:
            raise ValidationError("the client is closed; nothing was sent", operation=operation)

    async def _usable(self) -> C | None:
        """Find an idle connection that lives (failure model: connection gone before a statement)."""
        while (found := self._idle.take()) is not None:
            connection, doubtful = found
            if not doubtful or await self._answers(connection):
                return connection
            close(connection)
        return None

    async def _answers(self, connection: C) -> bool:
        try:
            with attempt(connection, _CONNECT, Moment.CONNECT, PING_TIMEOUT_S):
                await self._port.execute(connection, server.PING, None)
        except SupervisorError:
            return False
        except BaseException:
            close(connection)
            raise
        return True

    async def _connect(self) -> C:
        """Connect; where a pooler refuses `options`, once more without them, and so from then on."""
        plain = self._plain
        try:
            return await self._dial(plain=plain)
        except ConnectionLost as error:
            if plain or not refuses_options(error.message):
                raise
        connection = await self._dial(plain=True)
        self._plain = True
        return connection

    async def _dial(self, *, plain: bool) -> C:
        try:
            return await self._port.connect(self._settings.conninfo(plain=plain))
        except (psycopg.Error, OSError, UnicodeError) as error:
            raise translate(error, _CONNECT, Moment.CONNECT) from error

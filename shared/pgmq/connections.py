"""Connections that wait for no answer longer than they were told to, and what is asked of them before they are used.

The driver waits as long as the network does; a frozen one for ever. Here every wait for an answer has a deadline, on
both faces by the same few lines: the driver's own generator is wrapped, and looked at each tenth of a second.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeAlias, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import ConnStatus, TransactionStatus

from shared.errors import ProtocolError
from shared.pgmq.sqlstate import Moment, NoAnswer, ends_use, translate

__all__ = ["AsyncConnection", "Connection", "Idle", "attempt", "decoding", "is_reusable"]

T = TypeVar("T")

PING_AFTER_S: Final = 1.0
"""A connection that nobody used for longer is asked whether it lives: a half-open one looks like any other."""

PING_TIMEOUT_S: Final = 5.0


class _Bounded:
    """What both kinds of connection have more than the driver's."""

    deadline: float | None = None
    worn = False


class Connection(_Bounded, psycopg.Connection[tuple[Any, ...]]):
    """A blocking connection with a deadline for its answers."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for the driver's work, not beyond the deadline. Raises `NoAnswer`."""
        return super().wait(_until(self.deadline, gen), *args, **kwargs)


class AsyncConnection(_Bounded, psycopg.AsyncConnection[tuple[Any, ...]]):
    """An asyncio connection with a deadline for its answers."""

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for the driver's work, not beyond the deadline. Raises `NoAnswer`."""
        return await super().wait(_until(self.deadline, gen), *args, **kwargs)


AnyConnection: TypeAlias = Connection | AsyncConnection
C = TypeVar("C", bound=Connection | AsyncConnection)


def _until(deadline: float | None, gen: PQGen[T]) -> PQGen[T]:
    """Pass a generator of the driver on, until the deadline."""
    if deadline is None:
        return (yield from gen)
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() >= deadline:
                raise NoAnswer
            wanted = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


@contextlib.contextmanager
def attempt(
    connection: AnyConnection, operation: str, moment: Moment, limit_s: float | None, *, of_pgmq: bool = False
) -> Iterator[None]:
    """Say something to the server: within `limit_s`, and with the driver's errors as ours."""
    connection.deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        yield
    except (psycopg.Error, NoAnswer, OSError, UnicodeError) as error:
        ours = translate(error, operation, moment, of_pgmq=of_pgmq)
        connection.worn = connection.worn or ends_use(ours)
        raise ours from error
    finally:
        connection.deadline = None


@contextlib.contextmanager
def decoding(operation: str) -> Iterator[None]:
    """Read what the server answered; the statement is done by now."""
    try:
        yield
    except (psycopg.Error, ValueError, OverflowError) as error:
        raise ProtocolError(
            f"the statement was done, but its answer cannot be read: {error}", operation=operation
        ) from error


def is_reusable(connection: AnyConnection) -> bool:
    """Tell whether a connection that was used can be used by somebody else: alive, and in no transaction."""
    return not connection.worn and connection.pgconn.transaction_status == TransactionStatus.IDLE


def has_ended(connection: AnyConnection) -> bool:
    """Tell, without asking the server, whether an idle connection is dead.

    Anything to read counts: an idle session has nothing to say but its end, and one that changed its settings may as
    well be replaced.
    """
    if connection.pgconn.status != ConnStatus.OK:
        return True
    poller = select.poll()
    poller.register(connection.pgconn.socket, select.POLLIN | select.POLLRDHUP)
    return bool(poller.poll(0))


class Idle(Generic[C]):
    """Connections that nobody uses; the last used goes out first, so that what is not needed grows old."""

    def __init__(self) -> None:
        self._connections: deque[tuple[C, float]] = deque()

    def put(self, connection: C) -> None:
        """Keep one for later."""
        self._connections.append((connection, time.monotonic()))

    def take(self) -> tuple[C, bool] | None:
        """Give one that is not known to be dead, and whether it has to be asked; dead ones are closed on the way."""
        while True:
            try:
                connection, since = self._connections.pop()
            except IndexError:
                return None
            if not has_ended(connection):
                return connection, time.monotonic() - since > PING_AFTER_S
            close(connection)

    def close(self) -> None:
        """Close all of them."""
        while self._connections:
            close(self._connections.pop()[0])


def close(connection: AnyConnection) -> None:
    """Close a connection at once, whatever it is doing; the server rolls back what is open."""
    connection.pgconn.finish()

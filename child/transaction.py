"""`tx`: what a transactional handler works with. The transaction itself is opened and ended elsewhere.

`send` waits until just before the commit and goes out sorted by queue: the notify trigger locks one row a queue until
the end of the transaction, so an early send would block every producer of that queue, and two transactions that send
to two queues in opposite order would deadlock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from datetime import timedelta
from typing import Any, Final, NamedTuple

import psycopg

from child.body import encode_json
from child.message import checked_delay_ms
from child.session import Row
from shared.naming import validate_queue_name

_MAX_OUTGOING: Final = 100_000
_MAX_OUTGOING_BYTES: Final = 256 << 20

Delay = float | str | timedelta


class Outgoing(NamedTuple):
    """One message to send, as parameters of the statement."""

    queue: str
    body: str
    headers: str | None
    delay_ms: int

    def parameters(self) -> dict[str, object]:
        """By name."""
        return self._asdict()


class Outbox:
    """Messages that wait for the commit."""

    def __init__(self) -> None:
        self._waiting: list[Outgoing] = []
        self._bytes = 0

    def put(self, queue: str, body: object, delay: Delay, headers: dict[str, Any] | None) -> None:
        """Check everything that can be checked now, and keep it.

        Raises `ValidationError` for a name that is none, `ImpossibleDelay`, and TypeError or ValueError for what JSON
        cannot say.
        """
        validate_queue_name(queue)
        text = encode_json(body)
        headers_text = None if headers is None else encode_json(headers)
        self._bytes += len(text) + len(headers_text or "")
        if len(self._waiting) >= _MAX_OUTGOING or self._bytes > _MAX_OUTGOING_BYTES:
            raise ValueError("too many messages are waiting for this commit")
        self._waiting.append(Outgoing(queue, text, headers_text, checked_delay_ms(delay)))

    def sorted(self) -> list[Outgoing]:
        """By queue, and within a queue in the order of the calls."""
        return sorted(self._waiting, key=lambda outgoing: outgoing.queue)


class Transaction:
    """The transaction of one message. Over when the handler ends."""

    def __init__(self, connection: psycopg.Connection[Row], outbox: Outbox) -> None:
        self._connection: psycopg.Connection[Row] | None = connection
        self._outbox = outbox

    @property
    def connection(self) -> psycopg.Connection[Row]:
        """The psycopg connection: for COPY, pipelines, an ORM. Leave its transaction open: it is ours to end."""
        if self._connection is None:
            raise RuntimeError("the transaction is over: its handler has ended")
        return self._connection

    def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.Cursor[Row]:
        """As psycopg's `Connection.execute`."""
        return self.connection.execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> psycopg.Cursor[Row]:
        """As psycopg's `Cursor.executemany`; gives the cursor."""
        cursor = self.connection.cursor()
        cursor.executemany(query, params_seq, **options)
        return cursor

    def cursor(self, *args: Any, **options: Any) -> Any:
        """As psycopg's `Connection.cursor`."""
        return self.connection.cursor(*args, **options)

    def send(self, queue: str, body: object, delay: Delay = 0, headers: dict[str, Any] | None = None) -> None:
        """Send a message if and only if this transaction commits. `delay` in seconds, as timedelta or text."""
        if self._connection is None:
            raise RuntimeError("the transaction is over: its handler has ended")
        self._outbox.put(queue, body, delay, headers)

    def end(self) -> None:
        """The handler has ended; what it left running must not reach the next message's transaction."""
        self._connection = None


class _Done:
    """Lets `await tx.send(...)` be written as well as `tx.send(...)`."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class AsyncTransaction:
    """The same for async handlers, over a psycopg `AsyncConnection`."""

    def __init__(self, connection: psycopg.AsyncConnection[Row], outbox: Outbox) -> None:
        self._connection: psycopg.AsyncConnection[Row] | None = connection
        self._outbox = outbox

    @property
    def connection(self) -> psycopg.AsyncConnection[Row]:
        """The psycopg connection. Leave its transaction open: it is ours to end."""
        if self._connection is None:
            raise RuntimeError("the transaction is over: its handler has ended")
        return self._connection

    async def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.AsyncCursor[Row]:
        """As psycopg's `AsyncConnection.execute`."""
        return await self.connection.execute(query, params, **options)

    async def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> psycopg.AsyncCursor[Row]:
        """As psycopg's `AsyncCursor.executemany`; gives the cursor."""
        cursor = self.connection.cursor()
        await cursor.executemany(query, params_seq, **options)
        return cursor

    def cursor(self, *args: Any, **options: Any) -> Any:
        """As psycopg's `AsyncConnection.cursor`."""
        return self.connection.cursor(*args, **options)

    def send(self, queue: str, body: object, delay: Delay = 0, headers: dict[str, Any] | None = None) -> _Done:
        """Send a message if and only if this transaction commits. May be awaited, and need not be."""
        if self._connection is None:
            raise RuntimeError("the transaction is over: its handler has ended")
        self._outbox.put(queue, body, delay, headers)
        return _Done()

    def end(self) -> None:
        """See `Transaction.end`."""
        self._connection = None

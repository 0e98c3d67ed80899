"""`tx` for tests of transactional handlers: a real connection, ended as the verdict says."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from typing import Any

import psycopg

from crashtests.testing.messages import Delay, checked_delay_s

__all__ = ["AsyncTransaction", "Outbox", "Transaction"]

Row = tuple[Any, ...]
_SEND = (
    "select pgmq.send(queue_name => %s::text, msg => %s::jsonb, headers => %s::jsonb,"
    " delay => clock_timestamp() + %s * interval '1 second')"
)


class Outbox:
    """What is sent just before the commit, sorted by queue."""

    def __init__(self) -> None:
        """Begin empty."""
        self._waiting: list[tuple[str, str, str | None, float]] = []

    def put(self, queue: str, body: object, delay: Delay, headers: dict[str, Any] | None) -> None:
        """Keep one."""
        headers_text = None if headers is None else json.dumps(headers)
        self._waiting.append((queue, json.dumps(body), headers_text, checked_delay_s(delay)))

    def statements(self) -> list[tuple[str, tuple[str, str, str | None, float]]]:
        """The statements that send them."""
        return [(_SEND, one) for one in sorted(self._waiting, key=lambda one: one[0])]


class Transaction:
    """For plain handlers."""

    def __init__(self, connection: psycopg.Connection[Row], outbox: Outbox) -> None:
        """Work on this connection, which is in no transaction yet."""
        self.connection = connection
        self._outbox = outbox

    def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.Cursor[Row]:
        """As psycopg's."""
        return self.connection.execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> psycopg.Cursor[Row]:
        """As psycopg's; gives the cursor."""
        cursor = self.connection.cursor()
        cursor.executemany(query, params_seq, **options)
        return cursor

    def cursor(self, *args: Any, **options: Any) -> Any:
        """As psycopg's."""
        return self.connection.cursor(*args, **options)

    def send(self, queue: str, body: object, delay: Delay = 0, headers: dict[str, Any] | None = None) -> None:
        """Send if and only if this commits."""
        self._outbox.put(queue, body, delay, headers)


class _Done:
    """May be awaited."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class AsyncTransaction:
    """For async handlers."""

    def __init__(self, connection: psycopg.AsyncConnection[Row], outbox: Outbox) -> None:
        """See `Transaction`."""
        self.connection = connection
        self._outbox = outbox

    async def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.AsyncCursor[Row]:
        """As psycopg's."""
        return await self.connection.execute(query, params, **options)

    async def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> psycopg.AsyncCursor[Row]:
        """As psycopg's; gives the cursor."""
        cursor = self.connection.cursor()
        await cursor.executemany(query, params_seq, **options)
        return cursor

    def cursor(self, *args: Any, **options: Any) -> Any:
        """As psycopg's."""
        return self.connection.cursor(*args, **options)

    def send(self, queue: str, body: object, delay: Delay = 0, headers: dict[str, Any] | None = None) -> _Done:
        """Send if and only if this commits. May be awaited, and need not be."""
        self._outbox.put(queue, body, delay, headers)
        return _Done()

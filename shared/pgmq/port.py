"""What a face of the client supplies: the few steps that wait. All that is decided stands above, once.

The core is written as coroutines. asyncio runs them; the blocking face drives them through in one go, as each of its
steps blocks its thread and never suspends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString, Protocol, TypeAlias

import psycopg
from psycopg import sql
from psycopg.abc import Params

from shared.pgmq.connections import C

__all__ = ["Cursor", "Port", "Query"]

Query: TypeAlias = LiteralString | bytes | sql.SQL | sql.Composed
"""A statement: text of the program's own, never of its users."""


class Cursor(Protocol):
    """What the core reads of the driver's cursors."""

    @property
    def description(self) -> list[psycopg.Column] | None:
        """The columns, None where the statement gives no rows."""

    @property
    def rowcount(self) -> int:
        """How many rows were given or changed."""

    @property
    def statusmessage(self) -> str | None:
        """The server's word on what it did."""


class Port(Protocol[C]):
    """Waiting and saying, in one style."""

    async def acquire_slot(self, timeout_s: float) -> bool:
        """Wait for a permit to have a connection out; tell whether it came in time."""

    def release_slot(self) -> None:
        """Give a permit back."""

    def renew_slots(self) -> None:
        """Forget whatever permits a parent process has out."""

    async def connect(self, conninfo: str) -> C:
        """Make a connection in autocommit."""

    async def execute(self, connection: C, query: Query, parameters: Params | None) -> Cursor:
        """Say one statement."""

    async def execute_many(self, connection: C, query: Query, parameters: Sequence[Params]) -> Cursor:
        """Say one statement many times."""

    async def rows(self, cursor: Any) -> list[tuple[Any, ...]]:
        """Give all rows of a cursor that has some."""

    async def pause(self, seconds: float) -> None:
        """Wait, no longer than until the client is closed."""

    def wake(self) -> None:
        """End every pause for good."""

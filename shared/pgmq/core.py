"""The client without its face: requests on any connection, and what is more than one request."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

from shared.durations import parse_duration
from shared.pgmq import operations
from shared.pgmq.arguments import Duration, Filter
from shared.pgmq.capabilities import Capabilities, capabilities
from shared.pgmq.connecting import Settings
from shared.pgmq.connections import C, attempt, decoding
from shared.pgmq.messages import Message
from shared.pgmq.operations import Request
from shared.pgmq.pool import Pool
from shared.pgmq.port import Port
from shared.pgmq.transaction import Isolation, TransactionCore, begin

__all__ = ["ClientCore"]

T = TypeVar("T")


class ClientCore(Generic[C]):
    """One database, one pool. Every request is a statement of its own, which commits itself."""

    def __init__(self, settings: Settings, port: Port[C]) -> None:
        """Connect to nothing yet."""
        self._settings = settings
        self._port = port
        self._pool = Pool(settings, port)
        self._capabilities: Capabilities | None = None

    async def run(self, request: Request[T]) -> T:
        """Carry out one request on whichever connection is free."""
        limit_s = self._settings.answer_timeout_s
        connection = await self._pool.acquire(request.operation)
        try:
            with attempt(connection, request.operation, request.moment, limit_s, of_pgmq=True):
                cursor = await self._port.execute(connection, request.statement, request.parameters)
            with decoding(request.operation):
                rows = await self._port.rows(cursor)
        finally:
            self._pool.release(connection)
        return request.answer(rows)

    def transaction(self, isolation: Isolation | str | None, *, read_only: bool) -> TransactionCore[C]:
        """Describe a transaction; it takes its connection when it is entered."""
        statement = begin(isolation, read_only=read_only)
        return TransactionCore(self._pool, self._port, statement, self._settings.answer_timeout_s)

    async def read_with_poll(
        self,
        queue: str,
        *,
        visibility_timeout: Duration,
        quantity: int,
        where: Filter | None,
        max_wait: Duration,
        interval: Duration,
    ) -> list[Message]:
        """Read until something comes, holding no connection in between."""
        request = operations.read(queue, visibility_timeout=visibility_timeout, quantity=quantity, where=where)
        # Not below a millisecond: an interval of nothing would be a loop that never rests.
        rest_s = max(0.001, parse_duration(interval))
        deadline = time.monotonic() + parse_duration(max_wait)
        while not (messages := await self.run(request)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await self._port.pause(min(rest_s, left_s))
        return messages

    async def purge(self, queue: str, batch: int) -> int:
        """Delete batch by batch, each committed, until one finds less than it could take."""
        request = operations.purge_step(queue, batch=batch)
        total = 0
        while True:
            gone = await self.run(request)
            total += gone
            if gone < batch:
                return total

    async def capabilities(self, *, refresh: bool) -> Capabilities:
        """Ask the catalogs once, or again."""
        if refresh or self._capabilities is None:
            self._capabilities = await self.run(capabilities())
        return self._capabilities

    def close(self) -> None:
        """Close what is idle, end what pauses."""
        self._pool.close()
        self._port.wake()

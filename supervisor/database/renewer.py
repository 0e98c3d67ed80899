"""The renewer: keeps leases alive, on connections that nothing else uses, so that nothing else can delay it.

One connection is enough, and is all that is opened, unless a queue's renewal hangs (its table is locked): then the
other queues take the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from shared import syncpoints
from shared.errors import OperationTimeout
from shared.pgmq.records import RenewOutcome, RenewResult
from shared.pgmq.statements import settling
from supervisor.core.commands import Renew
from supervisor.core.events import Event, Renewed, RenewFailed
from supervisor.core.types import QueueName
from supervisor.database.arrays import fences
from supervisor.database.connections import Connection
from supervisor.database.failures import translate
from supervisor.database.line import Line
from supervisor.database.sessions import Pool

__all__ = ["RENEW_SESSIONS", "Renewer"]

RENEW_SESSIONS: Final = 3
"""At most so many at once, of one supervisor, for queues whose renewals overlap."""

# A part of the time left: the server gives up first, so that the connection lives on.
_SERVER_SHARE: Final = 0.8
_SET_TIMEOUT: Final = b"select set_config('statement_timeout', %(timeout_ms)s::text, true)"


class Renewer:
    """Answers every `Renew` with one `Renewed` or `RenewFailed` within its timeout, counted from the command."""

    def __init__(
        self, pool: Pool, queues: Sequence[QueueName], post: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        """`pool` is the renewer's own, and is closed with it."""
        self._pool = pool
        self._post = post
        self._clock = clock
        self._lines = {queue: Line(f"renew {queue}", self._work, self._failed) for queue in queues}

    def renew(self, command: Renew) -> None:
        """Start a renewal."""
        self._lines[command.queue].put((command, self._clock()))

    async def _work(self, item: tuple[Renew, float]) -> None:
        command, received_at = item
        left_s = command.timeout_s - (self._clock() - received_at)
        if left_s <= 0:
            raise OperationTimeout("other renewals took all of the time", operation="renew")
        async with asyncio.timeout(left_s):  # waiting for a session, and connecting, count too
            renewed = await self._pool.run("renew", lambda c: self._renew(c, command, left_s), left_s)
        self._post(renewed)

    def _failed(self, item: tuple[Renew, float], error: Exception) -> None:
        self._post(RenewFailed(item[0].queue, str(translate(error, "renew"))))

    async def _renew(self, connection: Connection, command: Renew, left_s: float) -> Renewed:
        queue = command.queue
        syncpoints.hit("parent.renew.before", {"queue": queue, "count": len(command.fences)})
        cursor = connection.cursor(binary=True)
        # One round trip; the limit holds for this transaction only, whoever's session a pooler gave us.
        async with connection.pipeline(), connection.transaction():
            await connection.execute(_SET_TIMEOUT, {"timeout_ms": max(1, round(left_s * 1000 * _SERVER_SHARE))})
            asked_at = self._clock()
            await cursor.execute(
                settling.renew(queue),
                {"lease_ms": round(command.lease_s * 1000), **fences(fence for _, fence in command.fences)},
            )
        leases: dict[int, Any] = dict(await cursor.fetchall())
        syncpoints.hit("parent.renew.after", {"queue": queue, "count": len(leases)})
        results = [
            _result(claim_id, leases.get(number)) for number, (claim_id, _) in enumerate(command.fences, start=1)
        ]
        return Renewed(queue, asked_at, tuple(results))

    async def close(self) -> None:
        """Stop; a renewal under way is given up."""
        for line in self._lines.values():
            await line.close()
        self._pool.close()


def _result(claim_id: int, lease_s: float | None) -> RenewResult:
    if lease_s is None:
        return RenewResult(claim_id, RenewOutcome.LOST, 0.0)
    if lease_s < 0:
        return RenewResult(claim_id, RenewOutcome.BUSY, 0.0)
    return RenewResult(claim_id, RenewOutcome.DONE, lease_s)

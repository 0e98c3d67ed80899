"""Pauses: rows in `pgmq_supervisor.paused` that every supervisor of a queue sees.

Where our schema is missing or closed to us a pause is local, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import SupervisorError
from shared.pgmq.statements import server
from supervisor.core.events import Event, PauseChanged
from supervisor.core.types import QueueName
from supervisor.database.connections import Connection
from supervisor.database.failures import translate
from supervisor.database.sessions import Pool
from supervisor.telemetry.facts import Fact, PauseIsLocal

__all__ = ["Pauses"]


class Pauses:
    """Posts `PauseChanged` for what changes in the table, and changes it."""

    def __init__(
        self,
        pool: Pool,
        queues: tuple[QueueName, ...],
        *,
        post: Callable[[Event], None],
        tell: Callable[[Fact], None],
        interval_s: float = 2.0,
    ) -> None:
        self._pool = pool
        self._queues = queues
        self._post = post
        self._tell = tell
        self._interval_s = interval_s
        self._in_table: set[QueueName] = set()
        self._local: set[QueueName] = set()
        self._told: set[QueueName] = set()  # as paused
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then keep looking."""
        await self.look()
        self._task = asyncio.create_task(self._run(), name="pauses")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Read the table and post what changed. A database that is away changes nothing."""
        try:
            self._in_table = await self._pool.run("look for pauses", self._read)
        except Exception:  # noqa: BLE001 - the boundary of this task; what is known stays true until it is read again
            return
        self._post_changes()

    async def _read(self, connection: Connection) -> set[QueueName]:
        cursor = await connection.execute(server.PAUSED_TABLE)
        row = await cursor.fetchone()
        if not row or not row[0]:
            return set()
        cursor = await connection.execute(server.PAUSED, {"queues": list(self._queues)})
        return {QueueName(queue) for (queue,) in await cursor.fetchall()}

    def _post_changes(self) -> None:
        paused = self._in_table | self._local
        for queue in self._queues:
            if (queue in paused) != (queue in self._told):
                self._post(PauseChanged(queue, queue in paused))
        self._told = paused

    async def pause(self, queue: QueueName, by: str) -> bool:
        """Pause a queue; False: only here, as the table cannot be written."""
        shared = await self._write(queue, server.PAUSE, {"queue": queue, "by": by})
        if shared:
            self._in_table.add(queue)
        else:
            self._local.add(queue)
        self._post_changes()
        return shared

    async def resume(self, queue: QueueName) -> bool:
        """Resume a queue; False: what stands in the table could not be removed, and the pause goes on elsewhere."""
        self._local.discard(queue)
        written = queue not in self._in_table
        if not written:
            written = await self._write(queue, server.RESUME, {"queue": queue})
            if written:
                self._in_table.discard(queue)
        self._post_changes()
        return written

    async def _write(self, queue: QueueName, statement: bytes, parameters: dict[str, str]) -> bool:
        async def write(connection: Connection) -> None:
            await connection.execute(statement, parameters)

        try:
            await self._pool.run("pause", write)
        except SupervisorError as error:
            self._tell(PauseIsLocal(queue, str(translate(error, "pause"))))
            return False
        return True

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

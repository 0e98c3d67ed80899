"""The keeper of notifications: looks whether trigger and throttle row stand, and repairs what is missing.

The throttle row lives in an unlogged table: after a crash of the server it is gone, and PGMQ's trigger is silent for
good. So both are looked at when the listener comes up and on a timer. The trigger is never made anew where it stands:
that takes the whole table's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final

from shared.errors import ConnectionLost, OperationTimeout, SupervisorError
from shared.pgmq.statements import notifying, queues
from supervisor.core.types import QueueName
from supervisor.database.connections import Connection
from supervisor.database.failures import translate
from supervisor.database.sessions import Pool
from supervisor.telemetry.facts import Fact, NotifyRepaired, NotifySetupFailed

__all__ = ["Keeper", "keep_notifications"]

_LOCK_TIMEOUT_MS: Final = 2000
_ABSENT_AGAIN_S: Final = 1.0


class Keeper:
    """Checks every queue when asked and each `interval_s`; failures are told, and the queue is polled meanwhile.

    Nothing is looked at before `writable`: on a hot standby nothing can be repaired, or even seen.
    """

    def __init__(
        self,
        pool: Pool,
        queues: tuple[QueueName, ...],
        tell: Callable[[Fact], None],
        *,
        writable: asyncio.Event,
        interval_s: float = 30.0,
    ) -> None:
        self._pool = pool
        self._writable = writable
        self._queues = queues
        self._tell = tell
        self._interval_s = interval_s
        self._told: dict[QueueName, str] = {}  # the failure that was told last
        self._seen: set[QueueName] = set()  # notified at some time: what is missing now was lost
        self._absent = False  # a queue is still to be made: look again soon
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="notification keeper")

    def check_soon(self) -> None:
        """Check all queues now."""
        self._wake.set()

    async def _run(self) -> None:
        await self._writable.wait()
        while True:
            # Jitter: many supervisors look after the same queues.
            wait_s = self._interval_s * random.uniform(0.75, 1.25)  # noqa: S311 - spreads load, protects nothing
            if self._absent:
                wait_s = min(wait_s, _ABSENT_AGAIN_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            self._absent = False
            for queue in self._queues:
                await self._look_after(queue)

    async def _look_after(self, queue: QueueName) -> None:
        try:
            repaired = await self._pool.run("notify setup", lambda connection: keep_notifications(connection, queue))
        except Exception as error:  # noqa: BLE001 - the boundary of this task: notifications are a nudge, work goes on
            failure: SupervisorError = translate(error, "notify setup")
            if failure.sqlstate is None and isinstance(failure, ConnectionLost | OperationTimeout):
                return  # the database is away, which others say: looked at again when the listener is back
            if self._told.get(queue) != failure.message:
                self._told[queue] = failure.message
                self._tell(NotifySetupFailed(queue, str(failure)))
            return
        failed_before = self._told.pop(queue, None) is not None
        if repaired == "queue":
            self._absent = True
            return
        if repaired == "both" and queue not in self._seen and not failed_before:
            repaired = None  # a new queue, no loss
        self._seen.add(queue)
        if repaired is not None:
            self._tell(NotifyRepaired(queue, "trigger" if repaired == "both" else repaired))

    async def close(self) -> None:
        """Stop."""
        self._task.cancel()
        await asyncio.wait({self._task})


async def keep_notifications(connection: Connection, queue: str) -> str | None:
    """Make or repair the notifications of a queue; says what was missing: "trigger", "throttle", "both" or None.

    "queue": it is not there (yet), nothing was done.
    """
    if (missing := await _missing(connection, queue)) in {None, "queue"}:
        return missing
    async with connection.transaction():
        await connection.execute(queues.SET_LOCK_TIMEOUT, {"timeout_ms": _LOCK_TIMEOUT_MS})
        await connection.execute(notifying.LOCK_QUEUE, {"queue": queue})
        missing = await _missing(connection, queue)  # others may have been faster
        parameters = {"queue": queue, "throttle_ms": notifying.THROTTLE_MS}
        if missing in {"trigger", "both"}:
            await connection.execute(notifying.ENABLE, parameters)
        elif missing == "throttle":
            await connection.execute(notifying.REPAIR_ROW, parameters)
        return missing


async def _missing(connection: Connection, queue: str) -> str | None:
    cursor = await connection.execute(notifying.CHECK, {"queue": queue})
    row = await cursor.fetchone()
    assert row is not None
    queue_stands, trigger, throttle_row = row
    if not queue_stands:
        return "queue"
    if not trigger:
        return "trigger" if throttle_row else "both"
    return None if throttle_row else "throttle"

"""The listener: LISTEN for all queues on one connection that does nothing else.

After every (re)connect LISTEN comes first and `ListenerUp` second, so that what the core reads then leaves no gap. A
heartbeat finds a peer that went without a word; a probe through another session finds out whether notifications come
through at all: behind a transaction pooler they do not, and LISTEN succeeds all the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from shared.errors import SupervisorError, UnsupportedError
from shared.naming import notify_channel
from shared.pgmq.statements import notifying, server
from supervisor.core.events import Event, ListenerDown, ListenerUp, Notified
from supervisor.core.types import QueueName
from supervisor.database.backoff import Backoff
from supervisor.database.connections import Connection, Connections, Detached
from supervisor.database.failures import translate
from supervisor.database.sessions import Pool
from supervisor.telemetry.facts import Fact, ListenerLost, ListenerReconnected, NotifySetupFailed

__all__ = ["Listener"]

_POOLED: Final = "notifications do not come through: a transaction pooler stands between; polling instead"
_POOLED_REMEDY: Final = "set [database] listen_dsn to the server itself"
_POOLED_AGAIN_S: Final = 60.0


class Listener:
    """Posts `Notified`, `ListenerUp` and `ListenerDown`. Two heartbeats without an answer end a session.

    `heartbeat_s` is both the silence before a heartbeat and the time that its answer may take. Nothing is tried before
    `writable`: a hot standby lets nobody listen.
    """

    def __init__(
        self,
        connections: Connections,
        pool: Pool,
        queues: tuple[QueueName, ...],
        *,
        detached: Detached,
        post: Callable[[Event], None],
        tell: Callable[[Fact], None],
        on_up: Callable[[], None],
        writable: asyncio.Event,
        heartbeat_s: float = 5.0,
        probe_s: float = 5.0,
    ) -> None:
        self._connections = connections
        self._pool = pool
        self._queues = queues
        self._channels = {notify_channel(queue): queue for queue in queues}
        self._probe_channel = f"pgmq_supervisor.probe.{secrets.token_hex(8)}"
        self._detached = detached
        self._post = post
        self._tell = tell
        self._on_up = on_up
        self._writable = writable
        self._heartbeat_s = heartbeat_s
        self._probe_s = probe_s
        self._backoff = Backoff(base_s=0.2, limit_s=5.0)
        self._is_up: bool | None = None  # None: never tried
        self._was_up = False
        self._probe_deadline: float | None = None  # on the event loop's clock
        self._probe_heard = False
        self._doubted = False  # notifications did not come through: no `ListenerUp` before a probe does
        self._task = asyncio.create_task(self._run(), name="listener")

    async def _run(self) -> None:
        await self._writable.wait()
        while True:
            wait_s = None
            try:
                await self._listen()
            except UnsupportedError as error:
                self._went_down(error)
                if not self._doubted:
                    for queue in self._queues:
                        self._tell(NotifySetupFailed(queue, str(error)))
                self._doubted = True
                wait_s = _POOLED_AGAIN_S
            except Exception as error:  # noqa: BLE001 - the boundary of this task: listening must come back
                self._went_down(translate(error, "listen"))
            await asyncio.sleep(self._backoff.next_s() if wait_s is None else wait_s)

    def _went_down(self, error: SupervisorError) -> None:
        if self._is_up is not False:  # one that stays away is told once
            self._post(ListenerDown(str(error)))
            self._tell(ListenerLost(str(error)))
        self._is_up = False

    async def _listen(self) -> None:
        """Listen on one connection until it ends, which raises."""
        connection = await self._connections.connect("listen")
        self._probe_deadline = None
        self._probe_heard = False
        probe: asyncio.Task[None] | None = None
        try:
            for statement in (*map(notifying.listen, self._queues), notifying.listen_to(self._probe_channel)):
                await self._within(connection, statement)
            probe = asyncio.create_task(self._send_probe(), name="listener's probe")
            while self._doubted:
                await probe
                await self._hear(connection)
                self._doubted = self._probe_deadline is not None
            self._post(ListenerUp(self._queues))
            if self._was_up:
                self._tell(ListenerReconnected(len(self._queues)))
            self._is_up = self._was_up = True
            self._on_up()
            clock = asyncio.get_running_loop().time
            up_at = clock()
            while True:
                heard_before_s = clock()
                await self._hear(connection)
                if clock() - heard_before_s >= self._heartbeat_s / 2:  # silence
                    await self._within(connection, server.PING)
                if clock() - up_at >= self._heartbeat_s:
                    self._backoff.reset()  # only a session that lasts proves that the trouble is over
        finally:
            if probe is not None:
                probe.cancel()
            self._detached.discard(connection)

    async def _hear(self, connection: Connection) -> None:
        """Pass on what comes, for one heartbeat or until the probe is due."""
        silence_s = self._heartbeat_s
        if self._probe_deadline is not None:
            silence_s = min(silence_s, self._probe_deadline - asyncio.get_running_loop().time())
        heard: set[QueueName] = set()
        async for notification in connection.notifies(timeout=max(0.0, silence_s), stop_after=1):
            if notification.channel == self._probe_channel:
                self._probe_heard = True
                self._probe_deadline = None
            elif (queue := self._channels.get(notification.channel)) is not None:
                heard.add(queue)
        for queue in heard:  # several at once are one nudge
            self._post(Notified(queue))
        if self._probe_deadline is not None and asyncio.get_running_loop().time() >= self._probe_deadline:
            raise UnsupportedError(_POOLED, operation="listen", remedy=_POOLED_REMEDY)

    async def _send_probe(self) -> None:
        """Notify ourselves through a session of the pool, as a producer would. Its failure proves nothing."""

        async def notify(connection: Connection) -> None:
            await connection.execute(notifying.NOTIFY, {"channel": self._probe_channel, "payload": "probe"})

        try:
            await self._pool.run("probe", notify, self._probe_s)
        except SupervisorError:
            if self._doubted:
                raise
            return
        if self._probe_heard:
            return  # it may come before its sender's answer
        self._probe_deadline = asyncio.get_running_loop().time() + self._probe_s

    async def _within(self, connection: Connection, statement: bytes) -> None:
        await self._detached.within(connection, _execute(connection, statement), self._heartbeat_s)

    async def close(self) -> None:
        """Stop listening."""
        self._task.cancel()
        await asyncio.wait({self._task})


async def _execute(connection: Connection, statement: bytes) -> None:
    await connection.execute(statement)

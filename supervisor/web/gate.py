"""The gate in front of the HTTP protocol: how many connections, how fast, and for how long.

The loop that serves HTTP renews leases, so its time is rationed before a byte is parsed. Connections are accepted at a
bounded rate and up to a bounded number; what is beyond waits in the kernel. Requests beyond the rate are not read from
their socket until there is time for them. A connection has `_QUIET_S` to send the head of a
request, counted from its start or from the last answer, which must also be read by then; what carries out a request has
`_BUSY_S`. Then it is cut.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, cast

MAX_CONNECTIONS: Final = 64
_ACCEPTS_PER_S: Final = 300.0
_REQUESTS_PER_S: Final = 500.0
_BURST_S: Final = 0.5  # what may come at once, in seconds of the rate
_QUIET_S: Final = 10.0
_BUSY_S: Final = 70.0  # above the time that an action may take
_LOOK_EVERY_S: Final = 1.0


class Ration:
    """So many a second; may be overdrawn, and tells how long to wait then."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = per_s * _BURST_S
        self._at = clock()

    def take(self, count: int = 1) -> float:
        """Take `count` and return the wait in seconds until the next may be taken; 0: now."""
        now = self._clock()
        self._left = min(self._per_s * _BURST_S, self._left + (now - self._at) * self._per_s) - count
        self._at = now
        return max(0.0, -self._left / self._per_s)


class GuardedProtocol(asyncio.Protocol):
    """Stands before the real protocol and counts what goes through."""

    def __init__(self, inner: asyncio.Protocol, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self.transport: asyncio.Transport | None = None
        self.busy = False
        self.since = gate.clock()
        self._resume: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the real protocol begin."""
        self.transport = cast("asyncio.Transport", transport)
        self._gate.connections[transport] = self
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass data on; when there were too many requests, read no more of this connection for a while."""
        wait_s = self._gate.requests.take(max(1, data.count(b"\r\n\r\n")))
        if wait_s > 0 and self._resume is None and self.transport is not None:
            self.transport.pause_reading()
            self._resume = asyncio.get_running_loop().call_later(wait_s, self._read_again)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on, and give the place free."""
        if self._resume is not None:
            self._resume.cancel()
        if self.transport is not None:
            self._gate.connections.pop(self.transport, None)
        self._gate.freed.set()
        self._inner.connection_lost(exc)

    def mark(self, *, busy: bool) -> None:
        """A request begins to be carried out, or its answer is ready."""
        self.busy = busy
        self.since = self._gate.clock()

    def _read_again(self) -> None:
        self._resume = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()


class Gate:
    """Accepts connections for a protocol."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        *,
        max_connections: int = MAX_CONNECTIONS,
        quiet_s: float = _QUIET_S,
        busy_s: float = _BUSY_S,
    ) -> None:
        self._factory = factory
        self._max = max_connections
        self._quiet_s = quiet_s
        self._busy_s = busy_s
        self.clock = asyncio.get_running_loop().time
        self.accepts = Ration(_ACCEPTS_PER_S, self.clock)
        self.requests = Ration(_REQUESTS_PER_S, self.clock)
        self.connections: dict[asyncio.BaseTransport, GuardedProtocol] = {}
        self.freed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, listeners: list[socket.socket]) -> None:
        """Begin to accept on listening, non-blocking sockets."""
        self._tasks = [asyncio.create_task(self._accept(sock), name="http-accept") for sock in listeners]
        self._tasks.append(asyncio.create_task(self._watch(), name="http-deadlines"))

    async def close(self) -> None:
        """Accept no more, and cut what is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for transport in list(self.connections):
            cast("asyncio.Transport", transport).abort()

    def of(self, transport: asyncio.BaseTransport | None) -> GuardedProtocol | None:
        """Find the connection of a request."""
        return None if transport is None else self.connections.get(transport)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.5)  # out of descriptors: others need the loop
                continue
            try:
                await loop.connect_accepted_socket(lambda: GuardedProtocol(self._factory(), self), sock)
            except OSError:
                sock.close()
            await asyncio.sleep(self.accepts.take())
            while len(self.connections) >= self._max and not self._cut_quietest():
                self.freed.clear()
                await self.freed.wait()

    def _cut_quietest(self) -> bool:
        """Make room: cut the connection that has been asking nothing for longest. False when all are busy."""
        quiet = [one for one in self.connections.values() if not one.busy]
        if not quiet:
            return False
        self._cut(min(quiet, key=lambda one: one.since))
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._quiet_s / 2))
            now = self.clock()
            for one in list(self.connections.values()):
                if now - one.since > (self._busy_s if one.busy else self._quiet_s):
                    self._cut(one)

    def _cut(self, one: GuardedProtocol) -> None:
        if one.transport is not None:
            self.connections.pop(one.transport, None)
            one.transport.abort()

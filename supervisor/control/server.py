"""The control socket's server: who connects is checked, every line and every wait has a limit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from supervisor.control.actions import Actions
from supervisor.control.binding import BoundSocket
from supervisor.control.peers import is_trusted, peer_uid
from supervisor.control.requests import answer

_MAX_CONNECTIONS: Final = 32
_MAX_LINE_BYTES: Final = 256 << 10
_IDLE_S: Final = 60.0  # a connection that asks nothing for so long is closed
_ACTION_S: Final = 60.0
_WRITE_S: Final = 10.0


class ControlServer:
    """Answers on a bound socket until it is closed."""

    def __init__(
        self, bound: BoundSocket, actions: Actions, *, on_refused: Callable[[int], None], idle_s: float = _IDLE_S
    ) -> None:
        """`on_refused(uid)`: another user connected and was turned away."""
        self._bound = bound
        self._actions = actions
        self._on_refused = on_refused
        self._idle_s = idle_s
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to accept; needs the running loop."""
        self._accepting = asyncio.create_task(self._accept(), name="control-accept")

    async def close(self) -> None:
        """Stop, ending connections that are open, and remove the socket."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._bound.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._bound.sock)
            except OSError:
                await asyncio.sleep(0.5)  # out of descriptors: others need the loop
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Turn away other users, and more connections than anybody needs."""
        try:
            uid = peer_uid(sock)
        except OSError:
            sock.close()
            return
        if not is_trusted(uid):
            sock.close()
            self._on_refused(uid)
        elif len(self._connections) >= _MAX_CONNECTIONS:
            sock.close()
        else:
            task = asyncio.create_task(self._serve(sock), name="control-connection")
            self._connections.add(task)
            task.add_done_callback(lambda done: self._ended(done, sock))

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        """Close also what was cancelled before it began."""
        self._connections.discard(task)
        sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_MAX_LINE_BYTES)
        try:
            with suppress(OSError, TimeoutError, ValueError):  # gone, silent, or a line without an end
                while True:
                    async with asyncio.timeout(self._idle_s):
                        line = await reader.readline()
                    if not line.endswith(b"\n"):
                        return
                    async with asyncio.timeout(_ACTION_S):
                        reply = await answer(self._actions, line)
                    writer.write(reply)
                    async with asyncio.timeout(_WRITE_S):
                        await writer.drain()
        finally:
            writer.transport.abort()

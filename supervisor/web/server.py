"""Start and stop HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web

from shared.errors import ConfigurationError
from supervisor.control.actions import Actions
from supervisor.web.app import make_app
from supervisor.web.gate import MAX_CONNECTIONS, Gate

_BACKLOG: Final = 128
_KEEPALIVE_S: Final = 10.0


class WebServer:
    """HTTP of one supervisor."""

    def __init__(
        self,
        actions: Actions,
        *,
        host: str,
        port: int,
        token: str | None,
        on_error: Callable[[BaseException], None],
        max_connections: int = MAX_CONNECTIONS,
        quiet_s: float = _KEEPALIVE_S,
    ) -> None:
        """`port` 0: any free one, see `port` after `start`. `on_error` is told of failures inside a request."""
        self._host = host
        self._wanted_port = port
        self._max_connections = max_connections
        self._quiet_s = quiet_s
        self._gate: Gate | None = None
        self._listeners: list[socket.socket] = []
        self._runner = web.AppRunner(
            make_app(actions, token=token, gate=lambda: self._gate, on_error=on_error),
            access_log=None,
            logger=_silent_logger(),
            handle_signals=False,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=1.0,
            max_line_size=4096,
            max_field_size=8190,
            auto_decompress=False,
        )

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._listeners[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Where to look."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/"

    async def start(self) -> None:
        """Listen. Raises `ConfigurationError` when the address cannot be had."""
        self._listeners = await asyncio.to_thread(_listen, self._host, self._wanted_port)
        await self._runner.setup()
        factory = self._runner.server
        assert factory is not None
        self._gate = Gate(factory, max_connections=self._max_connections, quiet_s=self._quiet_s)
        self._gate.start(self._listeners)

    async def close(self) -> None:
        """Stop listening and cut what is open."""
        if self._gate is not None:
            await self._gate.close()
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen on the addresses of a host, all with one port. The first must work; others are welcome."""
    listeners: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            chosen = (address[0], listeners[0].getsockname()[1] if listeners else port, *address[2:])
            try:
                listeners.append(_listener(family, kind, proto, chosen))
            except OSError:
                if not listeners:
                    raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            operation="http",
            remedy="choose another [http] port (0 takes any free one) or host",
        ) from error
    return listeners


def _listener(family: int, kind: int, proto: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _silent_logger() -> logging.Logger:
    """A client's nonsense is no news; failures of ours are told by `on_error`."""
    logger = logging.getLogger("pgmq_supervisor.http")
    logger.propagate = False
    logger.disabled = True
    return logger

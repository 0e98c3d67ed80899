"""A network that misbehaves on request: a proxy on loopback before any PostgreSQL, on TCP or on a Unix socket.

    with Proxy(dsn) as proxy:
        client = Client(proxy.dsn)
        proxy.freeze()          # nothing passes any more, and nobody hears of it; thaw() lets it go on
        proxy.freeze_open()     # the same for the connections that there are; new ones pass
        proxy.delay_s = 0.2     # each piece of data takes so long
        proxy.cut()             # every connection ends, in mid-word
        proxy.refuse()          # new connections are refused; accept() takes them again, on the same port
        trap = proxy.swallow_reply("commit")      # the next COMMIT is done, its answer is lost, the connection ends
        trap = proxy.cut_before("insert")         # the next INSERT is never delivered, the connection ends
        trap.wait()
        proxy.statements("insert")                # every statement seen so far, to prove that none was said twice

It runs in a thread of its own, so that blocking clients, asyncio and other processes can all be behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from psycopg import conninfo

from tests.support.links import PATIENCE_S, Link, Trap

__all__ = ["Proxy", "Trap"]

Result = TypeVar("Result")


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes on to the server of a DSN."""

    def __init__(self, dsn: str) -> None:
        """Take the server's address from the DSN; everything else in it stays as it is."""
        self._given = conninfo.conninfo_to_dict(dsn)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._links: set[Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._traps: list[Trap] = []
        self._said: list[str] = []
        self.flow = asyncio.Event()
        self.flow.set()
        self.delay_s = 0.0
        self.accepted = 0

    # ------------------------------------------------------------------ for tests

    @property
    def dsn(self) -> str:
        """The DSN by way of the proxy."""
        own: dict[str, Any] = {**self._given, "host": "127.0.0.1", "hostaddr": None, "port": self._port}
        return conninfo.make_conninfo("", **own)

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""
        return len(self._links)

    def statements(self, containing: str = "") -> list[str]:
        """Every statement that clients sent so far and that contains a text, in any case."""
        return [said for said in list(self._said) if containing.lower() in said.lower()]

    def cut(self) -> int:
        """End every connection; tell how many there were."""
        return self._call(self._cut)

    def freeze(self) -> None:
        """Hold everything back, new connections too, and end none."""
        self._call(self.flow.clear)

    def freeze_open(self) -> int:
        """Hold everything back on the connections that there are now; tell how many."""
        return self._call(self._freeze_open)

    def thaw(self) -> None:
        """Let go what was held back."""
        self._call(self._thaw)

    def refuse(self) -> None:
        """Refuse new connections, as a host without a server does; those that are there stay."""
        self._await(self._stop_listening())

    def accept(self) -> None:
        """Take new connections again, on the same port."""
        self._await(self._listen())

    def swallow_reply(self, text: str, *, times: int = 1) -> Trap:
        """Deliver the next statement with this text, wait until it is done, lose the answer, end the connection."""
        return self._set(Trap(text, deliver=True, times=times))

    def cut_before(self, text: str, *, times: int = 1) -> Trap:
        """End the connection of the next statement with this text before the server gets it."""
        return self._set(Trap(text, deliver=False, times=times))

    # ------------------------------------------------------------------ for links

    def look(self, statements: list[str]) -> Trap | None:
        """Write statements down; give the trap that one of them walks into."""
        self._said += statements
        for statement in statements:
            for trap in self._traps:
                if trap.takes(statement):
                    return trap
        return None

    # ------------------------------------------------------------------ inside

    def _set(self, trap: Trap) -> Trap:
        self._call(lambda: self._traps.append(trap))
        return trap

    def _freeze_open(self) -> int:
        for link in self._links:
            link.flow.clear()
        return len(self._links)

    def _thaw(self) -> None:
        self.flow.set()
        for link in self._links:
            link.flow.set()

    def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = str(self._given.get("host") or os.environ.get("PGHOST") or "127.0.0.1")
        port = int(self._given.get("port") or 5432)
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            server_reader, server_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        link = Link(self, writer, server_writer)
        self._links.add(link)
        tasks = [asyncio.create_task(work) for work in (link.up(reader), link.down(server_reader), link.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.discard(link)
        for end in (writer, server_writer):
            # What was passed on arrives; what was cut is cut already.
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()

    def _call(self, work: Callable[[], Result]) -> Result:
        async def inside() -> Result:
            return work()

        return self._await(inside())

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def __enter__(self) -> Self:
        """Listen."""
        self._thread.start()
        self._await(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every connection and stop listening."""
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _end(self) -> None:
        await self._stop_listening()
        self._thaw()
        self._cut()
        if self._serving:
            await asyncio.wait(set(self._serving), timeout=PATIENCE_S / 2)

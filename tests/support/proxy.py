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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from psycopg import conninfo

from tests.support.wiretap import Answers, Statements

__all__ = ["Proxy", "Trap"]

Result = TypeVar("Result")
_PIECE: Final = 1 << 16
_PATIENCE_S: Final = 30.0


@dataclass(eq=False)
class Trap:
    """Waits for a statement that contains `text`, in any case; springs `times` times."""

    text: str
    deliver: bool
    times: int = 1
    _sprung: threading.Event = field(default_factory=threading.Event)

    def matches(self, statement: str) -> bool:
        """Whether this one springs it."""
        return self.times > 0 and self.text.lower() in statement.lower()

    def spring(self) -> None:
        """Count it, and tell who waits."""
        self.times -= 1
        self._sprung.set()

    @property
    def sprung(self) -> bool:
        """Whether it has sprung at least once."""
        return self._sprung.is_set()

    def wait(self, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until it has sprung."""
        assert self._sprung.wait(timeout_s), f"no statement with {self.text!r} within {timeout_s:g} s"


class _Link:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._ends = (client, server)
        self._statements = Statements()
        self._answers = Answers(self._statements)
        self._swallowing: Trap | None = None
        self.flow = asyncio.Event()
        self.flow.set()
        self.ended = asyncio.Event()

    async def up(self, reader: asyncio.StreamReader) -> None:
        """From the client to the server."""
        while data := await reader.read(_PIECE):
            await self._pass_time()
            trap = self._proxy.look(self._statements.feed(data))
            if trap is not None and not trap.deliver:
                trap.spring()
                return
            if trap is not None:
                self._swallowing = trap
            await self._write(self._ends[1], data)

    async def down(self, reader: asyncio.StreamReader) -> None:
        """From the server to the client."""
        while data := await reader.read(_PIECE):
            await self._pass_time()
            ready = self._answers.feed(data)
            if self._swallowing is None:
                await self._write(self._ends[0], data)
            elif ready:
                self._swallowing.spring()
                return

    async def _pass_time(self) -> None:
        """Hold a piece of data back as long as the network is frozen or slow."""
        await self._proxy.flow.wait()
        await self.flow.wait()
        if self._proxy.delay_s:
            await asyncio.sleep(self._proxy.delay_s)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    async def wait(self) -> None:
        """Until it is cut."""
        await self.ended.wait()

    def cut(self) -> None:
        """End both sides at once; what was on its way is lost."""
        self.ended.set()
        for end in self._ends:
            end.transport.abort()


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes on to the server of a DSN."""

    def __init__(self, dsn: str) -> None:
        """Take the server's address from the DSN; everything else in it stays as it is."""
        self._given = conninfo.conninfo_to_dict(dsn)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._links: set[_Link] = set()
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
        return conninfo.make_conninfo(**{**self._given, "host": "127.0.0.1", "hostaddr": None, "port": self._port})

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
                if trap.matches(statement):
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
        link = _Link(self, writer, server_writer)
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
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

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
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    async def _end(self) -> None:
        await self._stop_listening()
        self._thaw()
        self._cut()
        if self._serving:
            await asyncio.wait(set(self._serving), timeout=_PATIENCE_S / 2)

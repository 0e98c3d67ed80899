"""One connection through the proxy, and the traps that may lie on its way."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Final, Protocol

from crashtests.wiretap import Answers, Statements

__all__ = ["PATIENCE_S", "Link", "Trap"]

PATIENCE_S: Final = 30.0
_PIECE: Final = 1 << 16


@dataclass(eq=False)
class Trap:
    """Waits for a statement that contains `text`, in any case; springs `times` times."""

    text: str
    deliver: bool
    times: int = 1
    _sprung: threading.Event = field(default_factory=threading.Event)

    def takes(self, statement: str) -> bool:
        """Whether this one walks into it; counted at once, so that no two do so who come together."""
        if self.times < 1 or self.text.lower() not in statement.lower():
            return False
        self.times -= 1
        return True

    def spring(self) -> None:
        """Tell who waits."""
        self._sprung.set()

    @property
    def sprung(self) -> bool:
        """Whether it has sprung at least once."""
        return self._sprung.is_set()

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until it has sprung."""
        assert self._sprung.wait(timeout_s), f"no statement with {self.text!r} within {timeout_s:g} s"


class Network(Protocol):
    """What all connections have in common."""

    flow: asyncio.Event
    delay_s: float

    def look(self, statements: list[str]) -> Trap | None:
        """Write statements down; give the trap that one of them walks into."""


class Link:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, network: Network, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._network = network
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
            trap = self._network.look(self._statements.feed(data))
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
        await self._network.flow.wait()
        await self.flow.wait()
        if self._network.delay_s:
            await asyncio.sleep(self._network.delay_s)

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

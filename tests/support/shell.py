"""The database shell under test: a `Database` with its events in a list that can be awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shared.pgmq.records import Ack, AckMode, ClaimedRow, Fence, SettleItem, Settlement, SettleResult
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.settings import QueueSettings
from supervisor.core.types import ClaimId, Mode, QueueName
from supervisor.database import Database
from supervisor.telemetry.facts import Fact
from tests.support.rows import QUEUE

Told = TypeVar("Told")
NAME = QueueName(QUEUE)
DELETE = Ack(AckMode.DELETE)


class Heard:
    """Things that were told, in order; each can be awaited once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._changed = asyncio.Event()

    def add(self, thing: Any) -> None:
        """Hear of a thing."""
        self.all.append(thing)
        self._changed.set()

    async def next(
        self, kind: type[Told], suits: Callable[[Told], bool] = lambda _: True, within_s: float = 30
    ) -> Told:
        """Take the first of this kind that suits, waiting for it."""
        async with asyncio.timeout(within_s):
            while True:
                for thing in self.all:
                    if isinstance(thing, kind) and suits(thing):
                        self.all.remove(thing)
                        return thing
                self._changed.clear()
                await self._changed.wait()


class Shell:
    """A started database side, spoken to as the core does."""

    def __init__(self, database: Database, events: Heard, facts: Heard) -> None:
        self.database = database
        self.events = events
        self.facts = facts
        self._ids = itertools.count(1)

    async def claim(self, limit: int = 100, *, lease_s: float = 30, budget: int = 64 << 20) -> e.Claimed:
        """Claim and wait for the answer."""
        self.database.claim(c.Claim(NAME, limit, lease_s, budget))
        return await self.events.next(e.Claimed)

    async def rows(self, limit: int = 100, *, lease_s: float = 30) -> tuple[ClaimedRow, ...]:
        """Claim; only the rows."""
        return (await self.claim(limit, lease_s=lease_s)).rows

    async def settle(self, *wanted: tuple[Fence, Settlement]) -> list[SettleResult]:
        """Settle all in one command; results in the order of what was wanted."""
        items = tuple(SettleItem(next(self._ids), fence, settlement) for fence, settlement in wanted)
        self.database.settle(c.Settle(NAME, items))
        found: dict[int, SettleResult] = {}
        while len(found) < len(items):
            for result in (await self.events.next(e.Settled)).results:
                assert result.claim_id not in found
                found[result.claim_id] = result
        return [found[item.claim_id] for item in items]

    def renew(self, *wanted: Fence, lease_s: float = 60, timeout_s: float = 5) -> None:
        """Ask for a renewal; claim ids count from 1."""
        fences = tuple((ClaimId(n), fence) for n, fence in enumerate(wanted, start=1))
        self.database.renew(c.Renew(NAME, fences, lease_s, timeout_s))


@asynccontextmanager
async def running(
    dsn: str, *queues: str, notify: bool = False, mode: Mode = Mode.REGULAR, **options: Any
) -> AsyncIterator[Shell]:
    """Start a database side for these queues, and close it."""
    events, facts = Heard(), Heard()

    def tell(fact: Fact) -> None:
        facts.add(fact)

    settings = [
        QueueSettings(name=name, handler="module:function", dead_letter_queue=f"{name}_dlq", notify=notify, mode=mode)
        for name in queues or (QUEUE,)
    ]
    database = Database(dsn, options.pop("listen_dsn", None), settings, post=events.add, tell=tell, **options)
    await database.start()
    try:
        yield Shell(database, events, facts)
    finally:
        await database.close()

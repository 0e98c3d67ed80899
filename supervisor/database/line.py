"""A line: things worked off one after the other by one task, which outlives every failure of its work."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["Line"]

Item = TypeVar("Item")


class Line(Generic[Item]):
    """Takes things without waiting and gives them to `work`, in order, one at a time.

    `work` answers every thing itself, failures too; what it raises all the same goes to `failed` with the thing, which
    must not raise.
    """

    def __init__(
        self, name: str, work: Callable[[Item], Awaitable[None]], failed: Callable[[Item, Exception], None]
    ) -> None:
        self._work = work
        self._failed = failed
        self._items: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run(), name=name)

    def put(self, item: Item) -> None:
        """Add a thing to the end."""
        self._items.append(item)
        self._idle.clear()
        self._wake.set()

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done."""
        return self._idle.is_set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            while self._items:
                item = self._items.popleft()
                try:
                    await self._work(item)
                except Exception as error:  # noqa: BLE001 - the boundary of this task: an answer is owed for the item
                    self._failed(item, error)
            self._wake.clear()
            self._idle.set()

    async def close(self, drain_s: float = 0.0) -> None:
        """Work off what is there, at most for `drain_s`, and end."""
        if drain_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
        self._task.cancel()
        await asyncio.wait({self._task})

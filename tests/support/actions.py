"""A supervisor at the seam of HTTP and the control socket: it remembers what it was asked, and answers as told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from supervisor.control.actions import ActionError, Refusal, Result


class RecordingActions:
    """Implements `Actions`."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.reasons: list[str] = []
        self.unready: dict[str, str] = {}
        self.failure: Exception | None = None
        self.hold: asyncio.Event | None = None  # an action waits for it
        self.document: dict[str, object] = {"queues": {}}

    async def _act(self, *what: object) -> Result:
        self.asked.append(what)
        if self.hold is not None:
            await self.hold.wait()
        if self.failure is not None:
            raise self.failure
        if len(what) > 1 and what[1] == "unknown":
            raise ActionError(Refusal.UNKNOWN, "no such queue")
        return {"done": what[0]}

    async def pause(self, queue: str) -> Result:
        return await self._act("pause", queue)

    async def resume(self, queue: str) -> Result:
        return await self._act("resume", queue)

    async def cancel(self, queue: str, msg_id: int) -> Result:
        return await self._act("cancel", queue, msg_id)

    async def redrive(self, queue: str, msg_ids: Sequence[int] | None, rate: float | None) -> Result:
        return await self._act("redrive", queue, msg_ids, rate)

    async def drain(self) -> Result:
        return await self._act("drain")

    def status(self) -> Mapping[str, object]:
        return self.document

    async def metrics(self, *, openmetrics: bool) -> tuple[bytes, str]:
        return (b"# EOF\n", "application/openmetrics-text") if openmetrics else (b"text\n", "text/plain")

    def not_live(self) -> Sequence[str]:
        return self.reasons

    def not_ready(self) -> Mapping[str, str]:
        return self.unready


async def until(look: Callable[[], object], *, timeout_s: float = 90.0) -> None:
    """Let the loop turn until `look` is true."""
    async with asyncio.timeout(timeout_s):
        while not look():  # noqa: ASYNC110 - what is looked at sets no event
            await asyncio.sleep(0.005)

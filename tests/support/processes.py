"""A real `Processes` with real children for tests: commands in, recorded events out, handlers written on the spot."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from shared.clock import boottime
from supervisor.core.commands import Dispatch, KillChild, StartChild
from supervisor.core.events import (
    ChildBootFailed,
    ChildDied,
    ChildReady,
    ChildSpawned,
    Event,
    MessageFinished,
    MessageStarted,
)
from supervisor.core.types import ChildId, ClaimId, DeathFacts, Outcome, QueueName
from supervisor.processes import procfs
from supervisor.processes.processes import Processes
from supervisor.processes.spec import ChildSpec
from supervisor.processes.sweeper import adopt_orphans

Found = TypeVar("Found")
PATIENCE_S = 20.0


class World:
    """One queue `q` (or more) and what was heard of its children."""

    def __init__(self, queues: Mapping[str, ChildSpec], **options: Any) -> None:
        """Needs a running loop."""
        self.events: list[Event] = []
        self.lines: list[tuple[ChildId, ClaimId | None, str]] = []
        self.logs: list[tuple[ChildId, ClaimId | None, str, str]] = []
        self.swept = 0
        self._changed = asyncio.Event()
        self._ids = itertools.count(1)
        self.pids: dict[ChildId, int] = {}
        self.children_before = set(procfs.read_children(os.getpid()))
        self.processes = Processes(
            queues=queues,
            post=self._post,
            clock=boottime,
            on_output=lambda child, claim, _stream, line: self.lines.append((child, claim, line)),
            on_log=lambda child, claim, level, text: self.logs.append((child, claim, level, text)),
            on_swept=self._on_swept,
            supervisor_name="test",
            **options,
        )

    def adopted(self) -> set[int]:
        """Children of this process that neither were there before nor are the guard or in the table."""
        known = {self.processes._guard.pid, *(process.pid for process in self.processes._table)}
        return set(procfs.read_children(os.getpid())) - self.children_before - known

    def _post(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, ChildSpawned):
            self.pids[event.child] = event.pid
        self._changed.set()

    def _on_swept(self, _queue: str, count: int) -> None:
        self.swept += count
        self._changed.set()

    async def until(self, look: Callable[[], Found], *, timeout_s: float = PATIENCE_S, what: str = "it") -> Found:
        """Look at each event and every 10 ms, for things that make none; fail after `timeout_s`."""
        deadline = boottime() + timeout_s
        while not (found := look()):
            assert boottime() < deadline, f"{what} did not come to pass; events: {self.events[-8:]}"
            self._changed.clear()
            try:
                async with asyncio.timeout(0.01):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return found

    async def event(self, kind: type[Found], child: ChildId, *, nth: int = 1, timeout_s: float = PATIENCE_S) -> Found:
        """The n-th event of a kind about a child."""

        def look() -> Found | None:
            found = [event for event in self.events if isinstance(event, kind) and event.child == child]  # type: ignore[attr-defined]
            return found[nth - 1] if len(found) >= nth else None

        event = await self.until(look, timeout_s=timeout_s, what=f"{kind.__name__} {nth} of child {child}")
        assert event is not None
        return event

    def spawn(self, queue: str = "q") -> ChildId:
        """Start a child; do not wait."""
        child = ChildId(next(self._ids))
        self.processes.start_child(StartChild(child, QueueName(queue), slot=0, incarnation=1))
        return child

    async def ready(self, queue: str = "q") -> ChildId:
        """Start a child and wait until it is READY."""
        child = self.spawn(queue)
        await self.until(
            lambda: any(
                isinstance(e, ChildReady | ChildBootFailed | ChildDied) and e.child == child for e in self.events
            )
        )
        assert not any(isinstance(e, ChildBootFailed | ChildDied) and e.child == child for e in self.events), (
            self.events
        )
        return child

    def dispatch(
        self,
        child: ChildId,
        body: bytes | None = b"null",
        *,
        lease_s: float | None = None,
        hard_timeout_s: float | None = None,
    ) -> ClaimId:
        """Hand a message over."""
        claim_id = ClaimId(next(self._ids))
        self.processes.dispatch(
            Dispatch(
                child=child,
                claim_id=claim_id,
                msg_id=claim_id,
                attempt=1,
                deliveries=1,
                enqueued_us=1,
                hard_timeout_s=hard_timeout_s,
                headers=None,
                body=body,
                lease_deadline=0.0 if lease_s is None else boottime() + lease_s,
            )
        )
        return claim_id

    async def started(self, claim_id: ClaimId) -> None:
        """Wait until it is known that the handler has begun."""
        await self.until(
            lambda: any(isinstance(e, MessageStarted) and e.claim_id == claim_id for e in self.events),
            what=f"start of {claim_id}",
        )

    def outcome(self, claim_id: ClaimId) -> Outcome | None:
        """The outcome, when it was told."""
        return next((e.outcome for e in self.events if isinstance(e, MessageFinished) and e.claim_id == claim_id), None)

    async def finished(self, claim_id: ClaimId) -> Outcome:
        """Wait for the outcome."""
        outcome = await self.until(lambda: self.outcome(claim_id), what=f"outcome of {claim_id}")
        assert outcome is not None
        return outcome

    async def died(self, child: ChildId, *, timeout_s: float = PATIENCE_S) -> DeathFacts:
        """Wait for the death."""
        return (await self.event(ChildDied, child, timeout_s=timeout_s)).facts

    def kill(self, child: ChildId, *, with_stack: bool = False) -> None:
        """KillChild."""
        self.processes.kill_child(KillChild(child, with_stack))

    def output_of(self, claim_id: ClaimId | None) -> list[str]:
        """Lines that were told with this message."""
        return [line for _, claim, line in self.lines if claim == claim_id]


def alive(pid: int) -> bool:
    """Whether a process can still run code."""
    stat = procfs.read_stat(pid)
    return stat is not None and stat.alive


def wait_for_end(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Wait for the end of a process, and let the event loop stand still meanwhile."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"{pid} does not end"
    finally:
        os.close(pidfd)


def write_handler(folder: Path, source: str, *, module: str = "app") -> str:
    """Write a handler module with the function `handle`. Returns its name for the configuration."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    return f"{module}:handle"


def spec_for(folder: Path, source: str, *, module: str = "app", **fields: Any) -> ChildSpec:
    """A queue whose handler is this source."""
    return ChildSpec(handler=write_handler(folder, source, module=module), app_dir=str(folder), **fields)


@asynccontextmanager
async def world(queues: Mapping[str, ChildSpec] | ChildSpec, **options: Any) -> AsyncIterator[World]:
    """A started World, closed afterwards: no process, no zombie and no descriptor may be left."""
    open_before = open_fds()
    made = World(queues if isinstance(queues, Mapping) else {"q": queues}, **options)
    await made.processes.start()
    try:
        yield made
    finally:
        await made.processes.close()
        adopt_orphans(on=False)  # or this process would collect the orphans of other tests
    assert not made.adopted()
    assert open_fds() <= open_before, [os.readlink(f"/proc/self/fd/{n}") for n in sorted(open_fds() - open_before)]


def open_fds() -> set[str]:
    """Our open descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name}")
            os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            found.discard(name)
    return found

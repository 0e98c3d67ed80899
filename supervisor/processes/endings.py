"""What happens when a child ends, in one place and in order.

1. its pidfd is readable: look without taking, so that its pid and its group's number stay its own
2. SIGKILL the group
3. its last words: frames that arrived whole count, and the output
4. kill and reap its descendants, again and again until none is left, at most a second
5. take its status, tell `ChildDied`; everything that it had said was told before
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from shared import syncpoints
from supervisor.core.events import ChildDied, Event
from supervisor.processes import reaper
from supervisor.processes.guard import Guard
from supervisor.processes.oom import OomWatch
from supervisor.processes.process import ChildProcess
from supervisor.processes.sweeper import Sweeper
from supervisor.processes.table import Table

OnSwept = Callable[[str, int], None]

_SWEEP_LIMIT_S: Final = 1.0
_FIRST_ROUND_S: Final = 0.001
_LAST_ROUND_S: Final = 0.02
_log = logging.getLogger(__name__)


class Endings:
    """Carries children from their death to their removal from the table."""

    def __init__(
        self,
        *,
        table: Table,
        sweeper: Sweeper,
        guard: Guard,
        oom: OomWatch,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Event], None],
        on_swept: OnSwept,
    ) -> None:
        """`on_swept(queue, count)` hears of processes that a child had left behind."""
        self._table = table
        self._sweeper = sweeper
        self._guard = guard
        self._oom = oom
        self._loop = loop
        self._post = post
        self._on_swept = on_swept
        self._none_left = asyncio.Event()

    def on_readable(self, process: ChildProcess) -> None:
        """A pidfd is readable (1 to 3)."""
        if process.ended or not reaper.has_ended(process.pidfd):
            return
        process.ended = True
        self._loop.remove_reader(process.pidfd)
        process.cancel_dump()
        process.kill_group()
        process.channel.drain()
        if process.output is not None:
            process.output.drain()
        self._sweep(process, give_up=self._loop.time() + _SWEEP_LIMIT_S, pause_s=_FIRST_ROUND_S)

    async def wait_until_none(self) -> None:
        """Until no child is in the table."""
        while len(self._table):
            self._none_left.clear()
            await self._none_left.wait()

    def _sweep(self, process: ChildProcess, *, give_up: float, pause_s: float) -> None:
        found = self._sweeper.sweep_child(
            process.child,
            may_be_in_use=lambda orphan: self._table.may_be_in_use(orphan, besides=process),
        )
        if found and self._loop.time() < give_up:
            next_s = min(pause_s * 2, _LAST_ROUND_S)
            self._loop.call_later(pause_s, lambda: self._sweep(process, give_up=give_up, pause_s=next_s))
            return
        if found:
            _log.error("%d processes that child %d left cannot be killed", found, process.child)
        self._bury(process)

    def _bury(self, process: ChildProcess) -> None:
        if process.output is not None:
            process.output.close()
        ending = reaper.reap(process.process)
        unexplained_kill = ending.signal == "SIGKILL" and not process.killed
        by_guard = self._guard.has_killed(process.guard_slot)
        if unexplained_kill and by_guard:
            _log.warning("pid %d was killed by the guard: its lease ran out while we stood still", process.pid)
        oom = unexplained_kill and not by_guard and self._oom.claim()
        facts = reaper.facts_of(process, ending, oom=oom, by_guard=unexplained_kill and by_guard)
        self._guard.forget(process.child)
        self._table.remove(process)
        process.close()
        swept = self._sweeper.killed.pop(process.child, 0)
        if swept:
            self._on_swept(process.queue, swept)
        syncpoints.hit("parent.death.before_settle", {"child": process.child, "pid": process.pid})
        self._post(ChildDied(process.child, facts))
        if not len(self._table):
            self._none_left.set()

"""What is done on timers: orphans that outlived their message, trees, peaks of memory, memory limits, OOM counter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from supervisor.core.events import Event, MemoryMeasured
from supervisor.processes import memory
from supervisor.processes.endings import OnSwept
from supervisor.processes.guard import Guard
from supervisor.processes.oom import OomWatch
from supervisor.processes.procfs import Identity
from supervisor.processes.sweeper import Sweeper
from supervisor.processes.table import Table, outlived

_ORPHANS_EVERY_S: Final = 0.5
_AFTER_A_KILL_S: Final = 0.01
_TREES_EVERY_S: Final = 1.0
_FORGET_EVERY_S: Final = 10.0
_MEMORY_EVERY_S: Final = 0.1


class Upkeep:
    """Repeating work, as long as it is open."""

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
        """Nothing runs before `start`."""
        self._table = table
        self._sweeper = sweeper
        self._guard = guard
        self._oom = oom
        self._loop = loop
        self._post = post
        self._on_swept = on_swept
        self._timers: dict[Callable[[], float], asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Begin."""
        for job in (self._orphans, self._trees, self._memory, self._forget):
            self._run(job)

    def close(self) -> None:
        """End, after a last look at orphans."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._orphans()

    def _run(self, job: Callable[[], float]) -> None:
        self._timers[job] = self._loop.call_later(job(), self._run, job)

    def _orphans(self) -> float:
        again = self._sweeper.sweep_orphans(
            is_live=lambda child: self._table.live(child) is not None,
            outlived=self._has_outlived,
            may_be_in_use=self._table.may_be_in_use,
        )
        for child in list(self._sweeper.killed):
            self._on_swept(self._table.queue_of(child), self._sweeper.killed.pop(child))
        return _AFTER_A_KILL_S if again else _ORPHANS_EVERY_S

    def _has_outlived(self, child: int, orphan: Identity) -> bool:
        process = self._table.live(child)
        return process is None or outlived(process, orphan)

    def _trees(self) -> float:
        self._oom.note()
        for process in self._table:
            if process.busy and not process.ended:
                process.measure_peak()
                self._sweeper.remember_tree(process.child, process.pid)
        self._guard.watch(self._sweeper.without_mark())
        return _TREES_EVERY_S

    def _memory(self) -> float:
        for process in self._table:
            limit_bytes = process.spec.memory_limit_bytes
            if limit_bytes is None or not process.busy or process.ended or process.killed:
                continue
            process.measure_peak()
            orphans = self._sweeper.orphans_of(process.child)
            used_bytes = memory.tree_bytes(process.pid, orphans, limit_bytes=limit_bytes)
            if used_bytes > limit_bytes:
                self._post(MemoryMeasured(process.child, used_bytes))
        return _MEMORY_EVERY_S

    def _forget(self) -> float:
        self._sweeper.forget_gone()
        return _FORGET_EVERY_S

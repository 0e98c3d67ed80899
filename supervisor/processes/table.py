"""Which children there are, by id and by pid, with the small numbers that they use and give back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from supervisor.core.types import ChildId
from supervisor.processes.process import ChildProcess
from supervisor.processes.procfs import TICK_S, Identity

_REMEMBERED: Final = 1000


class Table:
    """Children from their spawn until they are reaped."""

    def __init__(self) -> None:
        """Empty."""
        self._children: dict[ChildId, ChildProcess] = {}
        self._by_pid: dict[int, ChildId] = {}
        self._queues: dict[int, str] = {}

    def __len__(self) -> int:
        """How many are not reaped."""
        return len(self._children)

    def __iter__(self) -> Iterator[ChildProcess]:
        """In order of their spawn."""
        return iter(self._children.values())

    def get(self, child: ChildId) -> ChildProcess | None:
        """A child that is not reaped yet."""
        return self._children.get(child)

    def live(self, child: int) -> ChildProcess | None:
        """A child that has not ended."""
        process = self._children.get(ChildId(child))
        return None if process is None or process.ended else process

    def leader_of(self, pid: int) -> int | None:
        """The child whose process has this pid."""
        return self._by_pid.get(pid)

    def queue_of(self, child: int) -> str:
        """The queue of a child, also of one that ended lately; empty when that is long ago."""
        return self._queues.get(child, "")

    def add(self, process: ChildProcess) -> None:
        """A process was spawned; it gets the lowest metrics index that no other child of its queue has."""
        taken = {other.metrics_index for other in self._children.values() if other.queue == process.queue}
        process.metrics_index = next(index for index in range(len(taken) + 1) if index not in taken)
        self._children[process.child] = process
        self._by_pid[process.pid] = process.child
        self._queues[process.child] = process.queue
        while len(self._queues) > _REMEMBERED + len(self._children):
            del self._queues[next(iter(self._queues))]

    def remove(self, process: ChildProcess) -> None:
        """It was reaped: its pid may be anybody's now."""
        del self._children[process.child]
        del self._by_pid[process.pid]

    def may_be_in_use(self, orphan: Identity, *, besides: ChildProcess | None = None) -> bool:
        """Whether an orphan of unknown origin may belong to a message that still runs, or to a living module."""
        return any(process is not besides and not process.ended and not outlived(process, orphan) for process in self)


def outlived(process: ChildProcess, orphan: Identity) -> bool:
    """Whether an orphan, if it comes from this child, belongs to a message that has ended.

    What was there at READY belongs to the handler's module and may stay as long as the child. Start times are rounded
    down to a tick: in doubt an orphan belongs to the message in hand.
    """
    if process.ready_at is None:
        return orphan.started_at + TICK_S < process.spawned_at  # older than the child: not from it
    if orphan in process.module_processes:
        return False
    return process.handed_at is None or orphan.started_at + TICK_S < process.handed_at

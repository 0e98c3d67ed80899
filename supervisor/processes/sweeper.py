"""Find and kill what handlers left behind, and reap whatever was adopted.

The supervisor is a subreaper: an orphan below it becomes its direct child. So a direct child that nobody here started
is an escapee (setsid, double fork, nohup) or its zombie, and looking at the direct children again and again finds every
descendant of a dead process without a search of /proc. Whose it was:

1. the mark in its environment, inherited over fork and exec;
2. else its process group or session, when that is a child of ours;
3. else what was seen below a child before (a tree is remembered on a timer and before a kill);
4. else, for a process that cleared its environment: the stamp that it has inherited;
5. else, without a stamp: only our children have this oom_score_adj. Such a stray is killed when no message that was
   running at its start is running any more.

What has none of these is not from a handler (a server that this supervisor started, a stranger adopted as PID 1): it is
left alone while it lives, and reaped when it is a zombie that nobody else wants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from supervisor.processes import marks, procfs
from supervisor.processes.killing import kill_exactly
from supervisor.processes.procfs import Identity

_PR_SET_CHILD_SUBREAPER: Final = 36
_UNWANTED_AFTER_S: Final = 1.0  # somebody in this process may want the status of a zombie that we do not know


@dataclass(frozen=True, slots=True)
class Origin:
    """Which child a process comes from. `child` None: of a handler of an unknown child; all None: a stranger."""

    child: int | None = None
    stray: bool = False
    mark: marks.Mark | None = None


_STRANGER: Final = Origin()
_STRAY: Final = Origin(stray=True)


class Sweeper:
    """Knows the direct children that are not in the table."""

    def __init__(
        self,
        *,
        owner: str,
        clock: Callable[[], float],
        leader_of: Callable[[int], int | None],
        is_own: Callable[[int], bool],
        child_oom_score_adj: Iterable[int],
        stamp_of: Callable[[int], int | None],
    ) -> None:
        """`leader_of`: pid to child id; `stamp_of`: pid to the child of its stamp; `is_own`: waited for elsewhere."""
        self._owner = owner
        self._clock = clock
        self._leader_of = leader_of
        self._is_own = is_own
        self._stamp_of = stamp_of
        self._pid = os.getpid()
        self._namespace = procfs.pid_namespace()
        self._adjs = frozenset(child_oom_score_adj) - {procfs.read_oom_score_adj(self._pid)}
        self._origins: dict[Identity, Origin] = {}
        self._zombies: dict[Identity, float] = {}
        self._signalled: set[Identity] = set()
        self._evident: set[Identity] = set()  # marked, or in the group of a child
        self.killed: Counter[int] = Counter()  # by child id, until somebody takes the number

    def remember_tree(self, child: int, pid: int) -> None:
        """Note what is below a child now: after its death a process without a mark could not be told from others."""
        for descendant in procfs.read_descendants(pid):
            stat = procfs.read_stat(descendant)
            if stat is not None:
                self._origins[Identity(descendant, stat.start_ticks)] = Origin(child=child)

    def without_mark(self) -> dict[Identity, int]:
        """Known processes of children that no mark, group or session gives away, with their child (0: unknown)."""
        found: dict[Identity, int] = {}
        for identity, origin in self._origins.items():
            if origin == _STRANGER or origin.mark is not None or identity in self._evident:
                continue
            stat = procfs.read_stat(identity.pid)
            if stat is None or stat.start_ticks != identity.start_ticks:
                continue
            mark = marks.read(identity.pid)
            if self._leader_of(stat.pgrp) is not None or (mark is not None and mark.owner == self._owner):
                self._evident.add(identity)
            elif stat.alive:
                found[identity] = origin.child or 0
        return found

    def started_by_module(self, child: int, pid: int, spawned_at: float) -> frozenset[Identity]:
        """What a child's imports have started and left running, daemons included; asked at its READY."""
        self.remember_tree(child, pid)
        own = {identity for identity, origin in self._origins.items() if origin.child == child}
        for orphan, stat in self._escapees():
            origin = self._origin(orphan, stat)
            if origin.child == child or (origin.stray and orphan.started_at + procfs.TICK_S >= spawned_at):
                own.add(orphan)
        return frozenset(own)

    def sweep_child(self, child: int, *, may_be_in_use: Callable[[Identity], bool]) -> int:
        """Kill all that a dead child left. Returns how much was found; call again until that is 0."""
        found = 0
        for orphan, stat in self._escapees():
            origin = self._origin(orphan, stat)
            if origin.child == child or (origin.stray and not may_be_in_use(orphan)):
                found += 1
                self._end(orphan, stat, child)
        return found

    def sweep_orphans(
        self,
        *,
        is_live: Callable[[int], bool],
        outlived: Callable[[int, Identity], bool],
        may_be_in_use: Callable[[Identity], bool],
    ) -> bool:
        """Kill orphans that outlived their message or their child, reap zombies. True: look again soon."""
        progress = False
        seen: set[Identity] = set()
        for orphan, stat in self._escapees():
            seen.add(orphan)
            origin = self._origin(orphan, stat)
            child = origin.child
            if child is not None:
                over = not is_live(child) or outlived(child, orphan)
            elif origin.mark is not None:
                over = marks.owner_is_dead(origin.mark, self._namespace)
            else:
                over = origin.stray and not may_be_in_use(orphan)
            if over or (not stat.alive and self._is_unwanted(orphan, origin)):
                progress |= self._end(orphan, stat, child)
        self._zombies = {orphan: since for orphan, since in self._zombies.items() if orphan in seen}
        self._signalled &= seen
        return progress

    def forget_gone(self) -> None:
        """Drop what was remembered of processes that are gone."""
        self._origins = {
            identity: origin
            for identity, origin in self._origins.items()
            if (stat := procfs.read_stat(identity.pid)) is not None and stat.start_ticks == identity.start_ticks
        }
        self._evident &= self._origins.keys()

    def orphans_of(self, child: int) -> list[int]:
        """Living orphans that come from a child; part of its memory."""
        return [
            orphan.pid for orphan, stat in self._escapees() if stat.alive and self._origin(orphan, stat).child == child
        ]

    def _escapees(self) -> Iterable[tuple[Identity, procfs.Stat]]:
        for pid in procfs.read_children(self._pid):
            if self._leader_of(pid) is None and not self._is_own(pid):
                stat = procfs.read_stat(pid)
                if stat is not None and stat.ppid == self._pid:
                    yield Identity(pid, stat.start_ticks), stat

    def _origin(self, orphan: Identity, stat: procfs.Stat) -> Origin:
        known = self._origins.get(orphan)
        if known is None:
            known = self._find_origin(orphan.pid, stat)
            self._origins[orphan] = known
        return known

    def _find_origin(self, pid: int, stat: procfs.Stat) -> Origin:
        mark = marks.read(pid)
        if mark is not None and mark.owner == self._owner:
            return Origin(child=mark.child)
        child = self._leader_of(stat.pgrp)
        if child is None:
            child = self._leader_of(stat.session)
        if child is not None:
            return Origin(child=child)
        if mark is not None:
            return Origin(mark=mark)
        child = self._stamp_of(pid)
        if child is not None:
            return Origin(child=child)
        return _STRAY if procfs.read_oom_score_adj(pid) in self._adjs else _STRANGER

    def _is_unwanted(self, orphan: Identity, origin: Origin) -> bool:
        if origin != _STRANGER:
            return True
        now = self._clock()
        return now - self._zombies.setdefault(orphan, now) >= _UNWANTED_AFTER_S

    def _end(self, orphan: Identity, stat: procfs.Stat, child: int | None) -> bool:
        """Kill it or reap it. False: it was killed before and is still there."""
        progress = orphan not in self._signalled
        if stat.alive:
            self._signalled.add(orphan)
            self._kill_tree(orphan.pid, child)
        return self._reap(orphan, child) or progress

    def _kill_tree(self, pid: int, child: int | None) -> None:
        """Kill an orphan and what is below it. Parents first, so that nobody is there to start another."""
        below = [
            Identity(other, stat.start_ticks)
            for other in procfs.read_descendants(pid)
            if (stat := procfs.read_stat(other)) is not None
        ]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)  # a direct child that only we reap: the number is surely its own
        for identity in below:
            if child is not None:
                self._origins[identity] = Origin(child=child)
            kill_exactly(identity.pid, identity.start_ticks)

    def _reap(self, orphan: Identity, child: int | None) -> bool:
        try:
            reaped, status = os.waitpid(orphan.pid, os.WNOHANG)
        except ChildProcessError:
            return False
        if not reaped:
            return False
        self._origins.pop(orphan, None)
        if child is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self.killed[child] += 1
        return True


def adopt_orphans(*, on: bool = True) -> None:
    """Make orphans below us our children (PR_SET_CHILD_SUBREAPER, Linux 3.4)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)

"""What an earlier supervisor of this user left when it and its guard died together: found by its mark at our start."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

from supervisor.processes import marks, procfs
from supervisor.processes.killing import kill_exactly

_ROUNDS: Final = 100
_ROUND_S: Final = 0.01
_log = logging.getLogger(__name__)


async def sweep_left_overs() -> int:
    """Kill until none is left, at most a second. Returns how many were killed."""
    namespace = procfs.pid_namespace()
    killed = 0
    for _ in range(_ROUNDS):
        found = kill_left_overs_of_the_dead(namespace)
        if not found:
            break
        killed += found
        await asyncio.sleep(_ROUND_S)
    if killed:
        _log.warning("killed %d processes that a dead supervisor had left", killed)
    return killed


def kill_left_overs_of_the_dead(namespace: int) -> int:
    """Kill processes of this user whose mark names a supervisor that is gone. Returns how many; again until 0."""
    found = 0
    me, own_uid = os.getpid(), os.geteuid()
    for pid in procfs.all_pids():
        try:
            if pid == me or os.stat(f"/proc/{pid}").st_uid != own_uid:
                continue
        except OSError:
            continue
        stat = procfs.read_stat(pid)
        mark = marks.read(pid) if stat is not None and stat.alive else None
        if stat is not None and mark is not None and marks.owner_is_dead(mark, namespace):
            found += kill_exactly(pid, stat.start_ticks)
    return found

"""The mark in the environment of everything that a handler starts: whose it is, and whether that one still lives.

    PGMQ_SUPERVISOR_MARK=<name>/<pid>.<start ticks>.<pid namespace>:<child id>

Pid and start time name the supervisor's process for good, so a later supervisor can tell left-overs of a dead one from
the children of a living one. Pids of another PID namespace say nothing here and are left alone.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from supervisor.processes import procfs

VARIABLE: Final = "PGMQ_SUPERVISOR_MARK"
_KEY: Final = VARIABLE.encode()
_MARK: Final = re.compile(r"(?P<owner>[^:]*/(?P<pid>\d+)\.(?P<start>\d+)\.(?P<namespace>\d+)):(?P<child>\d+)")


class Mark(NamedTuple):
    """A mark, taken apart. `owner` is the text before the child's id."""

    owner: str
    pid: int
    start_ticks: int
    namespace: int
    child: int


def owner_of_this_process(name: str) -> str:
    """The part of our marks that names us."""
    stat = procfs.read_stat(os.getpid())
    ticks = stat.start_ticks if stat else 0
    return f"{re.sub(r'[^A-Za-z0-9_.@-]', '_', name)}/{os.getpid()}.{ticks}.{procfs.pid_namespace()}"


def make(owner: str, child: int) -> str:
    """The value for the environment of one child."""
    return f"{owner}:{child}"


def parse(text: str) -> Mark | None:
    """Take a mark apart; None when it is none."""
    match = _MARK.fullmatch(text)
    if match is None:
        return None
    return Mark(match["owner"], int(match["pid"]), int(match["start"]), int(match["namespace"]), int(match["child"]))


def read(pid: int) -> Mark | None:
    """The mark of a process, None when it has none, is a zombie, or belongs to somebody else."""
    text = procfs.read_environ_value(pid, _KEY)
    return parse(text) if text else None


def owner_is_dead(mark: Mark, namespace: int) -> bool:
    """Whether the supervisor that made this mark has ended. False when that cannot be said from here."""
    if mark.namespace != namespace:
        return False
    stat = procfs.read_stat(mark.pid)
    return stat is None or stat.start_ticks != mark.start_ticks or not stat.alive

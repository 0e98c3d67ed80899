"""The guard: outlives a dead supervisor by a moment and leaves nothing of it alive.

Executed as `python -I -S guard_main.py <socket fd> <table fd> <supervisor pid> <owner>` in its own session. It knows
the children by pidfd (sent over the socket) and their lease deadlines from the shared table. PDEATHSIG ends children
of a dead supervisor, but neither their helpers nor those of a frozen one; this process does.

    supervisor gone (pidfd or end of the socket)  ─▶ kill groups, marked processes and what is below, until none is left
    a deadline passed unrenewed                   ─▶ the same for that child; its slot says so

Processes that cleared their environment and left group and session carry no mark; the supervisor names those that it
has seen, so that they are killed too. One that started less than a second before the supervisor died may be missed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # -I -S: nothing but the standard library is on the path; ours comes last
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from supervisor.processes import marks, procfs
from supervisor.processes.guard_table import GuardTable
from supervisor.processes.killing import kill_by_pidfd, kill_exactly

REGISTER = struct.Struct("!Bqqqq")  # 1, slot, child, pid, start ticks; with the pidfd
FORGET = struct.Struct("!Bq")  # 2, child
WATCH = struct.Struct("!Bqqq")  # 3, child, pid, start ticks of a process without a mark
READY = b"ready"

_TABLE_PERIOD_S = 0.2
_ROUND_S = 0.004
_CHILD_LIMIT_S = 1.0
_LAST_LIMIT_S = 5.0


class Ward:
    """One registered child."""

    def __init__(self, slot: int, child: int, pid: int, start_ticks: int, pidfd: int) -> None:
        """Own the pidfd."""
        self.slot = slot
        self.child = child
        self.pid = pid
        self.start_ticks = start_ticks
        self.pidfd = pidfd


class Guard:
    """Watches one supervisor."""

    def __init__(self, sock: socket.socket, table: GuardTable, supervisor_pid: int, owner: str) -> None:
        """Open the supervisor's pidfd; None when it is gone already."""
        self._sock = sock
        self._table = table
        self._owner = owner
        self._wards: dict[int, Ward] = {}
        self._strangers: set[tuple[int, int]] = set()
        self._unmarked: dict[tuple[int, int], int] = {}  # pid and start ticks to child
        self._supervisor = os.pidfd_open(supervisor_pid) if os.getppid() == supervisor_pid else None

    def run(self) -> None:
        """Until the supervisor is gone; then until nothing of it is left."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if self._supervisor is not None:
            poller.register(self._supervisor, select.POLLIN)
        gone = self._supervisor is None
        while not gone:
            ready = dict(poller.poll(self._patience_s() * 1000))
            if ready.get(self._sock.fileno()):
                gone = not self._listen()
            if self._supervisor in ready:
                while self._listen():  # children registered in its last moment
                    pass
                gone = True
            if not gone:
                self._check_deadlines()
        self._end_all()

    def _patience_s(self) -> float:
        deadlines = [at for ward in self._wards.values() if (at := self._deadline(ward))]
        if not self._wards:
            return 60.0
        left = min(deadlines, default=0.0) - time.clock_gettime(time.CLOCK_BOOTTIME)
        return min(_TABLE_PERIOD_S, max(left, 0.001)) if deadlines else _TABLE_PERIOD_S

    def _listen(self) -> bool:
        """Take one message. False: nothing (more) comes."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 256, 4, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return self._supervisor is not None and not _is_over(self._supervisor)
        except OSError:
            return False
        if not data:
            return False
        if data[0] == 1:
            _, slot, child, pid, start_ticks = REGISTER.unpack(data)
            self._wards[child] = Ward(slot, child, pid, start_ticks, fds[0])
        elif data[0] == 2:
            ward = self._wards.pop(FORGET.unpack(data)[1], None)
            if ward is not None:
                os.close(ward.pidfd)
        else:
            _, child, pid, start_ticks = WATCH.unpack(data)
            self._unmarked = {key: of for key, of in self._unmarked.items() if _is_there(*key)}
            self._unmarked[pid, start_ticks] = child
        return True

    def _deadline(self, ward: Ward) -> float:
        return self._table.deadline(ward.slot) if ward.slot >= 0 else 0.0

    def _check_deadlines(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for ward in list(self._wards.values()):
            at = self._deadline(ward)
            if at and now >= at and not self._table.killed(ward.slot):
                self._table.set_killed(ward.slot)
                kill_by_pidfd(ward.pidfd)
                self._end([ward], limit_s=_CHILD_LIMIT_S)

    def _end_all(self) -> None:
        for ward in self._wards.values():
            kill_by_pidfd(ward.pidfd)
        killed = self._end(list(self._wards.values()), limit_s=_LAST_LIMIT_S, everything=True)
        if killed:
            _say(f"pgmq-supervisor guard: the supervisor is gone, {killed} of its processes were killed")

    def _end(self, wards: list[Ward], *, limit_s: float, everything: bool = False) -> int:
        """Kill until two looks in a row find nothing. Returns how many processes were killed."""
        give_up = time.monotonic() + limit_s
        killed: set[tuple[int, int]] = set()
        quiet = 0
        while quiet < 2 and time.monotonic() < give_up:
            found = self._find(wards, everything=everything)
            for pid, start_ticks in found:
                if kill_exactly(pid, start_ticks):
                    killed.add((pid, start_ticks))
            quiet = 0 if found else quiet + 1
            time.sleep(_ROUND_S)
        return len(killed)

    def _find(self, wards: list[Ward], *, everything: bool) -> list[tuple[int, int]]:
        """Living processes of these children: groups, sessions, marks, and all that is below one of them."""
        stats = {pid: stat for pid in procfs.all_pids() if (stat := procfs.read_stat(pid)) is not None}
        groups = {
            ward.pid
            for ward in wards
            if ward.pid not in stats or stats[ward.pid].start_ticks == ward.start_ticks  # else the number is reused
        }
        children = {ward.child for ward in wards}
        below: dict[int, list[int]] = {}
        roots: list[int] = []
        for pid, stat in stats.items():
            below.setdefault(stat.ppid, []).append(pid)
            if (
                pid in groups
                or stat.pgrp in groups
                or stat.session in groups
                or (stat.alive and self._is_marked(pid, stat, None if everything else children))
            ):
                roots.append(pid)
        found: dict[int, int] = {}
        while roots:
            pid = roots.pop()
            if pid not in found and pid != os.getpid():
                found[pid] = stats[pid].start_ticks
                roots += below.get(pid, [])
        return [(pid, ticks) for pid, ticks in found.items() if stats[pid].alive]

    def _is_marked(self, pid: int, stat: procfs.Stat, children: set[int] | None) -> bool:
        key = (pid, stat.start_ticks)
        if key in self._strangers or pid == os.getpid():
            return False
        child = self._unmarked.get(key)
        if child is None:
            mark = marks.read(pid)
            if mark is None or mark.owner != self._owner:
                self._strangers.add(key)
                return False
            child = mark.child
        return children is None or child in children


def _is_over(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _is_there(pid: int, start_ticks: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.alive


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode() + b"\n")


def _settle_in() -> None:
    """Deaf to what is meant for the supervisor's group, in nobody's way, and the last to go for memory."""
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGPIPE,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    ):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    for path, text in (("/proc/self/comm", "pgmq-guard"), ("/proc/self/oom_score_adj", "-500")):
        with contextlib.suppress(OSError):
            Path(path).write_text(text)


def main() -> None:
    """Entry point."""
    _settle_in()
    sock = socket.socket(fileno=int(sys.argv[1]))
    table_fd = int(sys.argv[2])
    table = GuardTable(table_fd)
    os.close(table_fd)
    guard = Guard(sock, table, int(sys.argv[3]), sys.argv[4])
    with contextlib.suppress(OSError):
        sock.send(READY)
    guard.run()


if __name__ == "__main__":
    main()

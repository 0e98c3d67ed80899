"""Processes of others: watched by pidfds, so that a signal never hits a number that was given away, found by marks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Process", "children_of", "marked", "title_of", "wait_until"]

CHILD_MARK: Final = "PGMQ_SUPERVISOR_MARK"  # docs/protocol.md: in the environment of every child and what it starts
_LOOK_AGAIN_S: Final = 0.005


def wait_until(look: Callable[[], bool], timeout_s: float, *, every_s: float = _LOOK_AGAIN_S) -> bool:
    """Look again and again; False where it did not come true in time. For what nobody can be woken by."""
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


class Process:
    """One process, for as long as this object lives."""

    def __init__(self, pid: int) -> None:
        """Open it. Raises `ProcessLookupError` where it is gone already."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def __repr__(self) -> str:
        """For messages."""
        return f"<process {self.pid}>"

    def signal(self, number: int) -> None:
        """Send a signal to exactly this process; nothing happens where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    def freeze(self, timeout_s: float = 5.0) -> bool:
        """SIGSTOP, and wait until it really stands; False where it has ended or does not stop."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: self.gone or self._state() in "TtZX", timeout_s)
        return self._state() in "Tt"

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    @property
    def gone(self) -> bool:
        """Whether it has ended; a zombie has."""
        return self.wait_gone(0.0)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait for its end; False where it still lives then."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _state(self) -> str:
        fields = _stat(self.pid)
        return fields[0] if fields else "X"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty where the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read()
    except OSError:
        return b""


def marked(variable: str, value: str) -> list[int]:
    """Living processes that inherited this variable with this value."""
    wanted = f"\0{variable}={value}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and wanted in _environ(int(name)):
            fields = _stat(int(name))
            if fields and fields[0] not in "ZX":
                found.append(int(name))
    return found


def children_of(parent_pid: int, *, with_mark: bool = True) -> list[int]:
    """Direct children of a supervisor: those that run handlers, or (`with_mark` False) all others."""
    wanted = f"\0{CHILD_MARK}=".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat(int(name))
        lives_below = len(fields) > 1 and fields[1] == str(parent_pid) and fields[0] not in "ZX"
        if lives_below and (wanted in _environ(int(name))) == with_mark:
            found.append(int(name))
    return sorted(found)


def title_of(pid: int) -> str:
    """What `ps` shows of it, for reports."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip() or "(no command line)"
    except OSError:
        return "(gone)"

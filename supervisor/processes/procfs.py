"""What /proc tells about processes. Every question may come too late; then the answer is None or empty.

Light to import: the guard uses it without site packages.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_MAX_ENVIRON_BYTES: Final = 1 << 20


class Identity(NamedTuple):
    """A process, named for good: pids are used again, but not with the same start."""

    pid: int
    start_ticks: int  # since boot

    @property
    def started_at(self) -> float:
        """Start on CLOCK_BOOTTIME in seconds, rounded down to a tick."""
        return self.start_ticks * TICK_S


class Stat(NamedTuple):
    """The part of /proc/PID/stat that we use."""

    state: str  # "Z": dead and not reaped, "X": going
    ppid: int
    pgrp: int
    session: int
    cpu_s: float
    start_ticks: int

    @property
    def alive(self) -> bool:
        """Whether it can still run code."""
        return self.state not in {"Z", "X"}


def read_stat(pid: int) -> Stat | None:
    """Read /proc/PID/stat. The name in it may hold blanks and brackets, so the fields count from its last bracket."""
    data = _read(f"/proc/{pid}/stat", 4096)
    if not data:
        return None
    fields = data[data.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) * TICK_S
    return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), cpu_s, int(fields[19]))


def read_environ_value(pid: int, name: bytes) -> str | None:
    """One variable of the environment that a process was started with (a fork without exec shows its parent's)."""
    data = _read(f"/proc/{pid}/environ", _MAX_ENVIRON_BYTES)
    prefix = name + b"="
    for entry in data.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("utf-8", "replace")
    return None


def read_children(pid: int) -> list[int]:
    """Pids whose parent is `pid`, zombies included. In order of no meaning."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                children += map(int, file.read(1 << 20).split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return [other for other in all_pids() if (stat := read_stat(other)) and stat.ppid == pid]
        except OSError:
            continue
    return children


def read_descendants(pid: int, limit: int = 10_000) -> list[int]:
    """Pids below `pid`, parents before children."""
    found: list[int] = []
    seen = {pid}
    waiting = [pid]
    while waiting and len(found) < limit:
        for child in read_children(waiting.pop()):
            if child not in seen:
                seen.add(child)
                found.append(child)
                waiting.append(child)
    return found


def all_pids() -> list[int]:
    """Every process that this PID namespace shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_status_kb(pid: int, field: bytes) -> int:
    """A size of /proc/PID/status in KiB, such as b"VmHWM"; 0 where there is none (a zombie has no memory)."""
    for line in _read(f"/proc/{pid}/status", 65536).split(b"\n"):
        if line.startswith(field) and line[len(field) : len(field) + 1] == b":":
            return int(line.split()[1])
    return 0


def catches_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; without one, sending it might simply kill."""
    for line in _read(f"/proc/{pid}/status", 65536).split(b"\n"):
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def read_rss_bytes(pid: int) -> int:
    """Resident set size."""
    fields = _read(f"/proc/{pid}/statm", 256).split()
    return int(fields[1]) * PAGE_BYTES if len(fields) > 1 else 0


def read_pss_bytes(pid: int) -> int:
    """Proportional set size: pages shared by n processes count 1/n. The resident set where the kernel hides it."""
    for line in _read(f"/proc/{pid}/smaps_rollup", 4096).split(b"\n"):
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return read_rss_bytes(pid)


def read_oom_score_adj(pid: int) -> int | None:
    """How willingly the kernel kills it for memory. Inherited over fork, exec and setsid; readable of a zombie."""
    data = _read(f"/proc/{pid}/oom_score_adj", 64)
    return int(data) if data else None


def raise_oom_score_adj(pid: int, wanted: int) -> None:
    """Offer a process to the out-of-memory killer before others. Only raised; where that is not allowed, nothing."""
    now = read_oom_score_adj(pid)
    if now is None or now >= wanted:
        return
    try:
        descriptor = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, b"%d" % min(wanted, 1000))
    except OSError:
        return
    finally:
        os.close(descriptor)


def pid_namespace() -> int:
    """A number for our PID namespace: pids of another one must not be compared with ours."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _read(path: str, limit: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        data = os.read(descriptor, limit)
        while len(data) < limit and (more := os.read(descriptor, limit - len(data))):
            data += more
    except OSError:
        return b""
    else:
        return data
    finally:
        os.close(descriptor)

"""The end of a process: look without taking, take with its usage, and say what it was."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import NamedTuple

from supervisor.core.types import DeathFacts
from supervisor.processes.process import ChildProcess


class Ending(NamedTuple):
    """A reaped process. Exit code and signal are both None when somebody else took its status."""

    exit_code: int | None
    signal: str | None
    cpu_s: float
    max_rss_kb: int


def has_ended(pidfd: int) -> bool:
    """Whether the process is a zombie. It stays one, so that its pid and its group's number stay its own."""
    try:
        return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # somebody else took its status


def reap(process: subprocess.Popen[bytes]) -> Ending:
    """Take the status of a zombie and keep `Popen` consistent, which has no way to return the usage."""
    try:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    except ChildProcessError:
        process.returncode = 0
        return Ending(None, None, 0.0, 0)
    if pid == 0:
        return Ending(None, None, 0.0, 0)
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    return Ending(
        exit_code=code if code >= 0 else None,
        signal=signal_name(-code) if code < 0 else None,
        cpu_s=round(usage.ru_utime + usage.ru_stime, 3),
        max_rss_kb=usage.ru_maxrss,
    )


def facts_of(child: ChildProcess, ending: Ending, *, oom: bool, by_guard: bool) -> DeathFacts:
    """What is recorded of a death.

    The peak is the sampled one; the kernel's counts only above the supervisor's own peak at the spawn, because a
    process that came by vfork and exec inherits its parent's.
    """
    kernel_peak_kb = ending.max_rss_kb if ending.max_rss_kb > child.parent_peak_kb else 0
    return DeathFacts(
        exit_code=ending.exit_code,
        signal=ending.signal,
        max_rss_kb=max(child.peak_kb, kernel_peak_kb),
        cpu_s=ending.cpu_s,
        stack=child.stack.text(),
        output_tail="" if child.output is None else child.output.tail(),
        oom=oom,
        by_guard=by_guard,
    )


def signal_name(number: int) -> str:
    """Name of a signal; real-time signals count from SIGRTMIN."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"

"""SIGKILL for exactly one process, never for one that inherited its number."""

from __future__ import annotations

import contextlib
import os
import signal

from supervisor.processes import procfs


def kill_exactly(pid: int, start_ticks: int) -> bool:
    """SIGKILL the process that has this pid *and* this start time. False: it is gone or not ours to kill."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        stat = procfs.read_stat(pid)  # after the open: the pidfd is of the process that is looked at, or of a dead one
        if stat is None or stat.start_ticks != start_ticks or not stat.alive:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    else:
        return True
    finally:
        os.close(pidfd)


def kill_by_pidfd(pidfd: int) -> None:
    """SIGKILL what a pidfd stands for; silent when it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

"""The first instants of a child, before anything that may be slow or may fail is imported.

Order matters: the descriptors become private before a handler could leak them to its own children, then the kernel is
told to kill us when the parent dies, and only then is asked whether the parent died before that.
"""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import fcntl
import os
import resource
import signal
from _signal import getsignal as _getsignal  # type: ignore[import-not-found] # has no stub
from typing import Final, NamedTuple

from child.farewell import PARENT_GONE, leave_now
from shared.wire.startmark import map_mark

_PR_SET_PDEATHSIG: Final = 1
_HIGH_DESCRIPTOR: Final = 700
_UNBUFFERED: Final = 2  # _IONBF

# Sent to whole groups by terminals and service managers. Python functions, not SIG_IGN: exec would inherit that, and
# what a handler starts must be stoppable. As they only return, an interrupted sleep or read goes on (PEP 475).
_SHRUGGED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Asked after each message: `signal.getsignal` makes enum members on its way, ten times the cost of the question.
_TERM, _INT, _HUP = (int(number) for number in _SHRUGGED)
_ALRM: Final = int(signal.SIGALRM)


class Ends(NamedTuple):
    """The descriptors that a child inherits, moved to where a handler hardly meets them, and what is mapped."""

    in_fd: int
    out_fd: int
    stack_fd: int
    start_mark: memoryview


def take_over(in_fd: int, out_fd: int, stack_fd: int, *, parent_pid: int) -> Ends:
    """Make the descriptors private, bind our life to the parent's, write stacks on a crash, shrug at group signals."""
    start_mark = map_mark(stack_fd)
    ends = Ends(_privatise(in_fd), _privatise(out_fd), _privatise(stack_fd), start_mark)
    die_with_parent()
    if os.getppid() != parent_pid:
        leave_now(PARENT_GONE)  # it died before prctl, and nobody would tell us
    yield_to_others()
    faulthandler.enable(file=ends.stack_fd, all_threads=True)
    shrug_at_group_signals()
    return ends


def die_with_parent() -> None:
    """Let the kernel kill us when the thread that started us is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def yield_to_others() -> None:
    """Do not push the parent off its processor whenever it hands us a message: it has others to serve (ADR 0021)."""
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return


def _privatise(fd: int) -> int:
    """Move a descriptor up and close it on exec.

    High numbers are not given to files that a handler opens after it closed what was not its own: our frames would
    go into them.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = _HIGH_DESCRIPTOR if soft > _HIGH_DESCRIPTOR + 8 else 3
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        os.set_inheritable(fd, False)
        return fd
    os.close(fd)
    return high


def _shrug(_signal_number: int, _frame: object) -> None:
    """Do nothing: messages that run finish, the parent says when to end."""


def shrug_at_group_signals() -> None:
    """Install the functions that do nothing. Repeated when a handler put its own in their place."""
    for number in _SHRUGGED:
        signal.signal(number, _shrug)


def calm_signals() -> bool:
    """After a handler: what it set must not fire between messages. True where an alarm could still call its function.

    Its functions for the group's signals are replaced, its timer is stopped. A function for SIGALRM stays, as modules
    set one when they are imported and only the timer for each message.
    """
    if _getsignal(_TERM) is not _shrug or _getsignal(_INT) is not _shrug or _getsignal(_HUP) is not _shrug:
        shrug_at_group_signals()
    if not _getsignal(_ALRM):
        return False
    signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def prepare_stack_dump(signal_number: int, stack_fd: int) -> None:
    """Write all Python stacks into the memfd when the parent sends `signal_number`.

    faulthandler works inside the C signal handler, so also while C code holds the interpreter. A parked thread keeps
    the signal open for the case that the main thread blocks all signals.
    """
    faulthandler.register(signal_number, file=stack_fd, all_threads=True, chain=False)
    _thread.start_new_thread(_park, (signal_number,))


def _park(signal_number: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal_number})
    gate = _thread.allocate_lock()
    gate.acquire()
    gate.acquire()  # never returns


def raise_oom_score(wanted: int) -> None:
    """Offer ourselves to the out-of-memory killer before the parent. Only raised; not being allowed is no error."""
    try:
        with open("/proc/self/oom_score_adj", "r+b", buffering=0) as file:
            if int(file.read()) < wanted:
                file.write(b"%d" % min(wanted, 1000))
    except (OSError, ValueError):
        return


def unbuffer_c_output() -> None:
    """What C code prints must not lie in a buffer of ours when the process is killed."""
    try:
        libc = ctypes.CDLL(None)
        for name in ("stdout", "stderr"):
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)
    except (ValueError, AttributeError, OSError):
        return


def resident_kb() -> int:
    """Memory of this process in KiB; 0 where it cannot be read."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except (OSError, ValueError, IndexError):
        return 0

"""Every way to leave. Each is bounded in time: a handler's endless thread or slow exit handler holds nothing up.

Exit codes: 0 asked to end, 70 an error of our own with a message in hand, 78 could not start (BOOT_FAILED was sent),
79 the parent is gone or a pipe is.
"""

from __future__ import annotations

import _thread
import faulthandler
import io
import os
import sys
import time
from typing import Final, NoReturn

CONFUSED: Final = 70
BOOT_FAILED: Final = 78
PARENT_GONE: Final = 79

_EXIT_HANDLERS_S: Final = 3.0
_BACKSTOP_S: Final = 4.0


def leave_now(code: int) -> NoReturn:
    """End this instant: no exit handlers, no waiting for threads."""
    flush_output()
    os._exit(code)


def leave_in_order(stack_fd: int) -> NoReturn:
    """Run what threading and atexit have registered, bounded by a watchdog, then end with code 0.

    The watchdog is a Python thread; behind it stands one in C, for the time in which Python threads do not run.
    """
    flush_output()
    try:
        faulthandler.dump_traceback_later(_BACKSTOP_S, exit=True, file=stack_fd)
        _thread.start_new_thread(_watch, ())
    except (RuntimeError, ValueError, OSError):
        os._exit(0)
    sys.exit(0)


def _watch() -> None:
    time.sleep(_EXIT_HANDLERS_S)
    os._exit(0)


def flush_output() -> None:
    """Let what a handler printed be in the pipe before its result is. Nothing that it did to the streams hurts."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - a handler may have closed them, or put anything in their place
        _repair_output()


def _repair_output() -> None:
    """Give the next handler working streams where this one closed them; leave what it put there and still works."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        try:
            getattr(sys, name).flush()
        except BaseException:  # noqa: BLE001 - see flush_output
            try:
                raw = io.FileIO(fd, "w", closefd=False)
            except OSError:
                setattr(sys, name, None)  # print() takes that as "nowhere"
            else:
                stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
                setattr(sys, name, stream)

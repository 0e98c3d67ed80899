"""Runs the user's event sink in a process of its own: a JSON line in, a call. It imports nothing of ours.

    python -u -P sinkhost.py MODULE:FUNCTION APP_DIR

What the function raises is told to the supervisor on the original stdout, `{"failed": 3, "error": "..."}`, and the
next event follows. The process ends with its input, or with its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable

REPORT_EVERY_S = 1.0
CANNOT_IMPORT = 78
_PR_SET_PDEATHSIG = 1


class Failures:
    """Counts what the function raised, and tells it at most once a second."""

    def __init__(self, fd: int) -> None:
        """Report on a descriptor whose reader may be gone."""
        self._fd = fd
        self._count = 0
        self._error = ""
        self._told_at = float("-inf")

    def add(self, error: str) -> None:
        """Note one failure."""
        self._count += 1
        self._error = error
        if time.monotonic() - self._told_at >= REPORT_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Report what was noted."""
        if not self._count:
            return
        self._told_at = time.monotonic()
        line = json.dumps({"failed": self._count, "error": self._error[:1000]}) + "\n"
        self._count = 0
        try:
            os.write(self._fd, line.encode())
        except OSError:
            os._exit(0)


def main(target: str, app_dir: str) -> int:
    """Import the sink and feed it until the input ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # sent to a whole group; the end of the input ends this process
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    failures = Failures(os.dup(1))
    os.dup2(2, 1)  # what the sink prints goes where the log goes
    sys.path.insert(0, app_dir)
    module, _, name = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError("it is not callable")
        sink: Callable[[dict[str, object]], object] = found
    except BaseException as error:  # noqa: BLE001 - foreign code
        failures.add(f"cannot import {target}: {type(error).__name__}: {error}")
        return CANNOT_IMPORT
    for line in sys.stdin.buffer:
        try:
            sink(json.loads(line))
        except BaseException as error:  # noqa: BLE001 - foreign code; not even SystemExit may lose later events
            failures.add(f"{type(error).__name__}: {error}")
    failures.tell()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

"""Log lines leave through a thread of their own: a reader that stalls, or a full disk, must not stop the loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_MAX_BYTES: Final = 4 << 20
_CLOSE_TIMEOUT_S: Final = 2.0


class LineWriter:
    """Write lines to a descriptor, in order. What does not fit in the buffer is dropped and counted."""

    def __init__(self, fd: int, *, on_dropped: Callable[[int], None], max_bytes: int = _MAX_BYTES) -> None:
        """Take a descriptor that stays the caller's. `on_dropped` is called with a number of lines, from any thread."""
        self._fd = fd
        self._on_dropped = on_dropped
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line that ends in a newline. Never blocks on the descriptor."""
        with self._changed:
            if self._closing or self._bytes + len(line) > self._max_bytes:
                dropped = True
            else:
                dropped = False
                self._lines.append(line)
                self._bytes += len(line)
                self._changed.notify()
        if dropped:
            self._on_dropped(1)

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything queued was written; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._busy, timeout_s)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Write what is queued, for a bounded time, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines) or self._closing)
                if not self._lines:
                    return
                batch = list(self._lines)
                self._lines.clear()
                self._bytes = 0
                self._busy = True
            if not self._write_all(b"".join(batch)):
                self._on_dropped(len(batch))
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> bool:
        """Write bytes to the end. False when the descriptor is closed, broken or full."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[:65_536]) :]
            except BlockingIOError:
                if not self._wait_writable():
                    return False
            except OSError:
                return False
        return True

    def _wait_writable(self) -> bool:
        """The descriptor is in non-blocking mode, which somebody else who shares it may have done."""
        import select  # noqa: PLC0415 - rare

        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        return bool(poller.poll(1000))

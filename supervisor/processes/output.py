"""A child's stdout and stderr: lines, each with the message that was in hand, never more than the loop can bear.

One pipe carries both. The pipe itself is the brake: one bounded read a callback, so a child that prints a gigabyte
waits in `write` while others are served. Beyond the line rate lines are counted, not told; the tail is always kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import termios
from array import array
from collections.abc import Callable
from typing import Final

from supervisor.core.types import ChildId, ClaimId

STREAM: Final = "output"
OnOutput = Callable[[ChildId, ClaimId | None, str, str], None]

_CHUNK_BYTES: Final = 64 << 10
_PIPE_BYTES: Final = 1 << 20  # what a pipe can hold at most without privileges: written before means read by then
_MAX_LINE_BYTES: Final = 8 << 10
_MAX_LINES_PER_S: Final = 500
_TAIL_BYTES: Final = 8 << 10
_JUST_NOW_S: Final = 0.001  # what came between a result and the next dispatch was read with the result
_waiting = array("i", [0])


class Output:
    """Reads one pipe. `claim_id` is whose lines these are."""

    def __init__(
        self,
        *,
        child: ChildId,
        fd: int,
        loop: asyncio.AbstractEventLoop,
        on_output: OnOutput,
        clock: Callable[[], float],
    ) -> None:
        """Start reading; the descriptor must be non-blocking and is closed with this object."""
        self.claim_id: ClaimId | None = None
        self._child = child
        self._fd = fd
        self._loop = loop
        self._on_output = on_output
        self._clock = clock
        self._drained_at = 0.0
        self._partial = bytearray()
        self._partial_cut = False
        self._tail = bytearray()
        self._second = 0.0
        self._lines = 0
        self._dropped = 0
        self._open = True
        self._reading = True
        loop.add_reader(fd, self._on_readable)

    def begin(self, claim_id: ClaimId, now: float) -> None:
        """A message is handed over: what comes from now on is its output."""
        if now - self._drained_at > _JUST_NOW_S:
            self.drain()
            self.flush()
        self.claim_id = claim_id
        if self._tail:
            self._tail.clear()

    def end(self) -> None:
        """The message's result is there: all that it wrote before is in the pipe."""
        self.drain()
        if self._partial or self._partial_cut or self._dropped:
            self.flush()
        self.claim_id = None
        self._drained_at = self._clock()

    def drain(self) -> None:
        """Read until the pipe is empty, at most what a pipe can hold."""
        left = _PIPE_BYTES
        while left > 0 and self._open:
            fcntl.ioctl(self._fd, termios.FIONREAD, _waiting, True)  # a third of the cost of a read in vain
            if not _waiting[0]:
                return
            left -= self._read() or left

    def flush(self) -> None:
        """Tell the unfinished line, and how many lines were dropped."""
        if self._partial:
            line = bytes(self._partial)
            self._partial.clear()
            self._tell(line)
        self._partial_cut = False
        self._tell_dropped()

    def tail(self) -> str:
        """The last output since the message was handed over."""
        return self._tail.decode("utf-8", "replace")

    def close(self) -> None:
        """Take what is there and close; a daemon that holds the other end is not waited for."""
        if not self._open:
            return
        self.drain()
        self.flush()
        self._stop()
        self._open = False
        os.close(self._fd)

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            data = b""
        if not data:
            self._stop()
            return 0
        self._take(data)
        return len(data)

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _take(self, data: bytes) -> None:
        self._tail += data[-_TAIL_BYTES:]
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        now = self._clock()
        if now - self._second >= 1.0:
            self._tell_dropped()
            self._second, self._lines = now, 0
        if self._lines >= _MAX_LINES_PER_S:
            self._skip(data)
            return
        start = 0
        while (newline := data.find(b"\n", start)) >= 0:
            self._extend(data[start : min(newline, start + _MAX_LINE_BYTES + 1)])
            start = newline + 1
            if self._lines >= _MAX_LINES_PER_S:
                self._dropped += 1
                self._partial.clear()
                self._skip(data[start:])
                return
            self._tell(bytes(self._partial))
            self._partial.clear()
            self._partial_cut = False
        self._extend(data[start : start + _MAX_LINE_BYTES + 1])

    def _skip(self, data: bytes) -> None:
        """Over the rate: count, and keep only the beginning of a line that is not finished."""
        newlines = data.count(b"\n")
        self._dropped += newlines
        if newlines:
            self._partial.clear()
            self._partial_cut = False
            data = data[data.rfind(b"\n") + 1 :]
        self._extend(data[: _MAX_LINE_BYTES + 1])

    def _extend(self, piece: bytes) -> None:
        room = _MAX_LINE_BYTES - len(self._partial)
        self._partial += piece[:room]
        if len(piece) > room:
            self._partial_cut = True

    def _tell(self, line: bytes) -> None:
        self._lines += 1
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._on_output(self._child, self.claim_id, STREAM, text + " ... [cut]" if self._partial_cut else text)

    def _tell_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._on_output(self._child, self.claim_id, STREAM, f"[{dropped} lines dropped]")

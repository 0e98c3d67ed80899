"""What `ps` shows of a child. Each message changes it twice, so it is never stale and has to cost next to nothing."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Final

try:
    from setproctitle import setproctitle
except ImportError:  # pragma: no cover - a platform without a wheel: titles are a comfort
    _set: Callable[[str], None] | None = None
else:
    _set = setproctitle

_LONGEST_TAIL_BYTES: Final = 48  # "#-9223372036854775808 attempt 2147483647", and its end
_ARGUMENTS_AT: Final = 45  # in /proc/self/stat behind the name: where the command line begins and ends in our memory


class Title:
    """The title of one child: `pgmq-child queue[slot] ...`.

    The library says the first one, with two system calls. From then on it is written into the memory that the library
    has chosen, all of it, as a handler may have put another there; where that is not found, the library goes on.
    """

    __slots__ = ("_base", "_idle", "_on", "_place", "_write")

    def __init__(self, queue: str, slot: int, *, on: bool) -> None:
        self._base = f"pgmq-child {queue}[{slot}] ".encode()
        self._on = on and _set is not None
        self._idle = self._base + b"idle"
        self._place: memoryview | None = None
        self._write = struct.Struct("").pack_into

    def show_starting(self) -> None:
        """Imports run."""
        self._show(self._base + b"starting")
        if self._on:
            self._place = place = _find(self._base + b"starting")
            if place is not None:
                self._write = struct.Struct(f"{len(place)}s").pack_into  # fills up with zeros

    def show_message(self, msg_id: int, attempt: int) -> None:
        """A handler runs."""
        self._show(b"%b#%d attempt %d" % (self._base, msg_id, attempt))

    def show_claiming(self) -> None:
        """A transaction is open, or about to be."""
        self._show(self._base + b"claiming")

    def show_idle(self) -> None:
        """Nothing in hand."""
        self._show(self._idle)

    def _show(self, title: bytes) -> None:
        if self._place is not None:
            self._write(self._place, 0, title)
        elif self._on and _set is not None:
            _set(title.decode())


def _find(shown: bytes) -> memoryview | None:
    """Find the memory of our command line; None where `shown` does not stand there, or a longer one has no room."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        begin, end = int(fields[_ARGUMENTS_AT]), int(fields[_ARGUMENTS_AT + 1])
    except (OSError, ValueError, IndexError):
        return None
    size = end - begin - 1  # its last byte stays zero: that is how the kernel knows where it ends
    if begin == 0 or size < len(shown) + _LONGEST_TAIL_BYTES:
        return None
    if ctypes.string_at(begin, len(shown) + 1) != shown + b"\0":
        return None
    return memoryview((ctypes.c_char * size).from_address(begin)).cast("B")

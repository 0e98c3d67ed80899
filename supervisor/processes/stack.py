"""The memfd into which a child's faulthandler writes: at a fatal signal, or when asked before a kill.

Its first page is not for stacks: there the child marks which message it has begun (`shared.wire.startmark`).
"""

from __future__ import annotations

import os
from typing import Final

from shared.wire.startmark import PAGE_BYTES, read_mark

_MAX_TEXT_BYTES: Final = 64 << 10
_TRUNCATE_ABOVE_BYTES: Final = 1 << 20


class StackFile:
    """One child's memfd, opened for appending on the child's side."""

    def __init__(self, fd: int) -> None:
        """Own the descriptor."""
        self._fd = fd
        self._base = PAGE_BYTES

    def begin(self) -> None:
        """A message is handed over: what was written until now is not about it."""
        size = os.lseek(self._fd, 0, os.SEEK_END)  # costs a third of fstat; the child appends, whatever the offset is
        if size > _TRUNCATE_ABOVE_BYTES:
            os.ftruncate(self._fd, PAGE_BYTES)
            size = PAGE_BYTES
        self._base = size

    def begun(self) -> int:
        """The message whose handler was begun last."""
        return read_mark(self._fd)

    def size(self) -> int:
        """Bytes written in all; grows while a dump is being written."""
        return os.fstat(self._fd).st_size

    def text(self) -> str:
        """What was written since `begin`, cut to 64 KiB."""
        size = self.size()
        base = self._base if size >= self._base else min(size, PAGE_BYTES)  # the child may truncate its own descriptor
        return os.pread(self._fd, min(size - base, _MAX_TEXT_BYTES), base).decode("utf-8", "replace")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

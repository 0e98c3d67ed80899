"""The number of the message whose handler was begun last, in memory that a child shares with its parent.

A frame for it would cost every message a system call, and its parent a wake-up, to say what is only asked when a
message lasts or its child dies. The number stands at the beginning of the child's stack file; the stacks follow after
one page. The child maps that page. The parent reads the file instead: a child can cut it off, and whoever has a page
mapped that is gone dies of it.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final

PAGE_BYTES: Final = 4096
_NUMBER: Final = struct.Struct("=Q")


def make_room(fd: int) -> None:
    """Prepare a new file: no message was begun."""
    os.ftruncate(fd, PAGE_BYTES)


def map_mark(fd: int) -> memoryview:
    """The child's side: store the number of a message with `mark[0] = seq` just before its handler is called."""
    return memoryview(mmap.mmap(fd, PAGE_BYTES)).cast("Q")


def read_mark(fd: int) -> int:
    """The parent's side. 0 before the first message, and where the child has cut its file off."""
    data = os.pread(fd, _NUMBER.size, 0)
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else 0

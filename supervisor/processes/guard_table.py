"""The table that supervisor and guard share: per slot which child, its pid, and until when it may run.

The supervisor writes without a system call, so a deadline costs nothing per message; the guard reads on a timer and
writes only `killed`. Every cell is eight aligned bytes, which a machine writes whole.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

SLOTS: Final = 4096
_CELLS: Final = 4  # child, pid, deadline, killed
_BYTES: Final = SLOTS * _CELLS * 8


class GuardTable:
    """A view of the memfd. Deadlines are CLOCK_BOOTTIME seconds, 0 for none."""

    def __init__(self, fd: int) -> None:
        """Map the descriptor, which may be closed afterwards."""
        self._map = mmap.mmap(fd, _BYTES)
        self._numbers = memoryview(self._map).cast("q")
        self._times = memoryview(self._map).cast("d")

    def begin(self, slot: int, *, child: int, pid: int) -> None:
        """A child moves in; no deadline yet."""
        cell = slot * _CELLS
        self._times[cell + 2] = 0.0
        self._numbers[cell + 3] = 0
        self._numbers[cell] = child
        self._numbers[cell + 1] = pid

    def end(self, slot: int) -> None:
        """The child is gone."""
        cell = slot * _CELLS
        self._times[cell + 2] = 0.0
        self._numbers[cell + 1] = 0

    def set_deadline(self, slot: int, deadline: float) -> None:
        """Until when this child may run without another word; 0: for ever."""
        self._times[slot * _CELLS + 2] = deadline

    def deadline(self, slot: int) -> float:
        """Read it."""
        return self._times[slot * _CELLS + 2]

    def set_killed(self, slot: int) -> None:
        """The guard killed this child."""
        self._numbers[slot * _CELLS + 3] = 1

    def killed(self, slot: int) -> bool:
        """Whether it did."""
        return self._numbers[slot * _CELLS + 3] != 0

    def close(self) -> None:
        """Unmap."""
        self._numbers.release()
        self._times.release()
        self._map.close()


def create() -> int:
    """A descriptor for a new, empty table."""
    fd = os.memfd_create("pgmq-supervisor-guard", os.MFD_CLOEXEC)
    os.ftruncate(fd, _BYTES)
    return fd

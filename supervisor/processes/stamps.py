"""A mark that a process cannot shed by clearing its environment and leaving its group and session: a resource limit.

The limit on POSIX message queues is inherited over fork, exec and setsid, and lowering it by a few bytes harms nobody.
How many bytes it is below ours says which child a process comes from, also after it has become a zombie. Where our own
limit leaves no room for that, there is no stamp, and what `Sweeper` says of strays holds.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

_ROOM: Final = 1 << 16
_LEAST: Final = 4 * _ROOM
_WITHOUT_LIMIT: Final = 1 << 30


class Stamps:
    """Children of this process."""

    def __init__(self) -> None:
        """Look at our own limit."""
        own, _ = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
        self._base = _WITHOUT_LIMIT if own == resource.RLIM_INFINITY else own
        self._children: dict[int, int] = {}

    def put(self, pid: int, child: int) -> None:
        """Stamp a process that was just started; what it starts has the stamp too."""
        if self._base < _LEAST:
            return
        number = child % _ROOM
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_MSGQUEUE)
            resource.prlimit(pid, resource.RLIMIT_MSGQUEUE, (self._base - 1 - number, hard))
            self._children[number] = child

    def read(self, pid: int) -> int | None:
        """The child that a process comes from; None without a stamp of ours."""
        try:
            soft, _ = resource.prlimit(pid, resource.RLIMIT_MSGQUEUE)
        except OSError:
            return None
        return self._children.get(self._base - 1 - soft)

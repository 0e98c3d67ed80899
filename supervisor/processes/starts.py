"""Finds out which handlers have begun: children mark it in memory, and somebody has to look.

One timer looks at those that have a message and have not begun it, as long as there are any; a result or an end that
comes before it says the same. A start is told some milliseconds late: limits of handlers count from then.
"""

from __future__ import annotations

import asyncio
from typing import Final

from supervisor.processes.table import Table

_LOOK_EVERY_S: Final = 0.005  # messages that are quicker never need a look


class Starts:
    """Call `expect` when a message is handed over."""

    def __init__(self, table: Table, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing is expected yet."""
        self._table = table
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """A handler is about to begin."""
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        awaited = 0
        for process in self._table:
            awaited += process.channel.awaits_start()
        if awaited:
            self.expect()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""The story of a seed: its last steps as text, and a number that names the whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final
from zlib import crc32

from supervisor.core import commands as c
from supervisor.core import events as e

_KEPT: Final = 400


class Story:
    def __init__(self) -> None:
        self.steps = 0
        self.number = 0
        self._tail: deque[tuple[float, str, object, c.Answer | None]] = deque(maxlen=_KEPT)

    def add(self, now: float, who: str, event: e.Event, commands: c.Answer) -> None:
        """One step of a core."""
        self.steps += 1
        names = " ".join([type(command).__name__ for command in commands])
        self.number = crc32(f"{now!r} {who} {type(event).__name__} {names}".encode(), self.number)
        self._tail.append((now, who, event, commands))

    def note(self, now: float, what: str) -> None:
        """Something that happened in the world."""
        self.number = crc32(f"{now!r} {what}".encode(), self.number)
        self._tail.append((now, "world", what, None))

    def tail(self, last: int) -> Iterator[str]:
        for now, who, event, commands in list(self._tail)[-last:]:
            yield f"{now:.6f} {who}: {event}"
            for command in commands or ():
                yield f"{'':>15} {command}"

"""Lines of standard input, in batches: as large as they come, but never held back while nothing more comes."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Batch", "read_batches"]

_READ_BYTES: Final = 1 << 20
_IDLE_S: Final = 0.2
_LINE_LIMIT: Final = 256 << 20  # as long as the longest body that a child accepts


@dataclass(slots=True)
class Batch:
    """Lines that are not empty, with their numbers from 1. `refused`: numbers of those that cannot be read, and why."""

    numbers: list[int] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    size: int = 0  # bytes read

    def add(self, number: int, line: bytes) -> None:
        """Take one line in."""
        self.size += len(line) + 1
        if not line.strip():
            return
        if b"\x00" in line:
            self.refused.append((number, "has a NUL byte"))
            return
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            self.refused.append((number, f"is not UTF-8 at byte {error.start + 1}"))
            return
        self.numbers.append(number)
        self.bodies.append(text)


def read_batches(fd: int, *, max_lines: int = 1000, max_bytes: int = 4 << 20) -> Iterator[Batch]:
    """Give batches until the end of the input. A producer that pauses gets what it wrote sent."""
    number = 0
    pending = b""
    batch = Batch()
    ended = False
    while not ended:
        if batch.size and not select.select([fd], [], [], _IDLE_S)[0]:
            yield batch
            batch = Batch()
        chunks = [pending]
        size = len(pending)
        while True:
            data = os.read(fd, _READ_BYTES)
            ended = not data
            chunks.append(data)
            size += len(data)
            if ended or b"\n" in data or size > _LINE_LIMIT:
                break
        *lines, pending = b"".join(chunks).split(b"\n")
        if ended and pending:
            lines.append(pending)
        for line in lines:
            number += 1
            batch.add(number, line)
            if len(batch.bodies) >= max_lines or batch.size >= max_bytes:
                yield batch
                batch = Batch()
        if len(pending) > _LINE_LIMIT:
            batch.refused.append((number + 1, "is longer than 256 MB; reading ends here"))
            ended = True
    if batch.size or batch.refused:
        yield batch

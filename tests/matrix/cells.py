"""The cells of the matrix, and what came of each. Values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

__all__ = ["CELLS", "OLDEST", "Cell", "Outcome", "Result", "parse"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A major version of PostgreSQL and a version of PGMQ; `image`: in a container that holds both."""

    postgres: int
    pgmq: str
    image: bool = False

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.postgres}:{self.pgmq}"


_POSTGRES: Final = (14, 15, 16, 17, 18)
_PGMQ: Final = ("1.11.1", "1.13.0")

# 1.12 was never shipped as plain SQL: it comes in its own image, or not at all.
CELLS: Final = (
    *(Cell(postgres, pgmq) for postgres in _POSTGRES for pgmq in _PGMQ),
    Cell(18, "1.12.0", image=True),
)

OLDEST: Final = Cell(15, "1.11.1")
"""What CI runs beside the default: the oldest PGMQ, on a server that the system's packages bring, with partitions."""


def parse(text: str) -> Cell:
    """Find a cell by its name. Raises `ValueError`."""
    for cell in CELLS:
        if str(cell) == text:
            return cell
    raise ValueError(f"there is no cell {text}; there are {', '.join(map(str, CELLS))}")


class Outcome(StrEnum):
    """What came of a cell."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell's outcome. `server` says which programs; `reason` why it was not run or how it failed."""

    cell: Cell
    outcome: Outcome
    reason: str = ""
    server: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    skips: tuple[str, ...] = field(default=())
    log: str = ""

    def fields(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "cell": str(self.cell), "outcome": self.outcome.value}

"""The generator: from a seed to a story, which says what is sent and when what is killed. A seed is a story.

How the story goes on between two faults is the machine's; what is done to it is not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from crashtests.scene import REGULAR, TRANSACTIONAL

__all__ = ["CONCURRENCY", "Fault", "FaultKind", "Story", "Work", "tell_story"]

CONCURRENCY: Final = 2  # of each queue
_MESSAGES: Final = 30
_SPAN_S: Final = 4.0  # in which the faults come
_MOST_FAULTS: Final = 5


class FaultKind(StrEnum):
    """What is done."""

    CHILD = "kill a child"
    CHILDREN = "kill all children"
    PARENT = "kill the parent"
    PARENT_AND_GUARD = "kill the parent and its guard"
    GUARD = "kill the guard"
    FREEZE = "freeze the parent beyond a lease"
    DEPLOY = "stop in order and start again"
    SESSION = "end a session of the supervisor"
    BACKEND = "kill -9 a backend of PostgreSQL"
    POSTGRES = "stop PostgreSQL immediately"
    POSTMASTER = "kill -9 the postmaster"


# How often each is chosen, and how many handlers may run again for it: at most all that were running.
_WEIGHTS: Final[Mapping[FaultKind, int]] = {
    FaultKind.CHILD: 8,
    FaultKind.CHILDREN: 3,
    FaultKind.PARENT: 6,
    FaultKind.PARENT_AND_GUARD: 2,
    FaultKind.GUARD: 1,
    FaultKind.FREEZE: 1,
    FaultKind.DEPLOY: 2,
    FaultKind.SESSION: 3,
    FaultKind.BACKEND: 2,
    FaultKind.POSTGRES: 2,
    FaultKind.POSTMASTER: 1,
}
_LOSES_SESSIONS: Final = frozenset(
    {FaultKind.SESSION, FaultKind.BACKEND, FaultKind.POSTGRES, FaultKind.POSTMASTER, FaultKind.FREEZE}
)
_ONE: Final = frozenset({FaultKind.CHILD, FaultKind.SESSION})
_NONE: Final = frozenset({FaultKind.GUARD, FaultKind.DEPLOY})


@dataclass(frozen=True, slots=True)
class Work:
    """One message."""

    queue: str
    op: str
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: when, counted from the first message that is worked on; `pick` in [0, 1) chooses among several."""

    at_s: float
    kind: FaultKind
    pick: float
    pause_s: float  # until what was killed is started again

    @property
    def repeats(self) -> int:
        """How many handlers may run again."""
        return 0 if self.kind in _NONE else 1 if self.kind in _ONE else 2 * CONCURRENCY

    def text(self) -> str:
        """One line."""
        return f"{self.at_s:5.2f} s {self.kind}"


@dataclass(frozen=True, slots=True)
class Story:
    """All of it."""

    seed: int
    works: tuple[Work, ...]
    faults: tuple[Fault, ...]

    @property
    def repeats(self) -> int:
        """How many handlers may run again at most: for faults, and for messages whose first attempt fails anyway."""
        return sum(fault.repeats for fault in self.faults) + sum("ends" in work.body for work in self.works)

    @property
    def loses_sessions(self) -> bool:
        """Whether a handler may lose its session and go on."""
        return any(fault.kind in _LOSES_SESSIONS for fault in self.faults)

    def text(self) -> str:
        """The story in words."""
        return f"seed {self.seed}: {len(self.works)} messages; " + "; ".join(f.text().strip() for f in self.faults)


def tell_story(seed: int) -> Story:
    """Make the story of a seed."""
    rng = random.Random(seed)
    works = tuple(_work(rng, number) for number in range(_MESSAGES))
    count = rng.randint(1, _MOST_FAULTS)
    times = sorted(round(rng.uniform(0.05, _SPAN_S), 3) for _ in range(count))
    kinds = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    faults = tuple(
        Fault(at_s, kind, rng.random(), round(rng.choice([0.0, rng.uniform(0.0, 1.0)]), 3))
        for at_s, kind in zip(times, kinds, strict=True)
    )
    return Story(seed, works, faults)


def _work(rng: random.Random, number: int) -> Work:
    queue = rng.choice([REGULAR, TRANSACTIONAL])
    body: dict[str, Any] = {"sleep_ms": rng.choice([0, 5, 50, 200, 600])}
    ends = rng.choice([*[""] * 9, "raise", "exit", "kill"])
    if ends:
        body["ends"] = ends
    if rng.random() < 0.1:
        body["leaves"] = True
    return Work(queue, f"w{number}", body)

"""One child process, as the core sees it. Mutable, owned by its pool."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from supervisor.core.delivery import Delivery
from supervisor.core.states import ChildState, check_child
from supervisor.core.types import ChildId, DeathCause


@dataclass(slots=True, eq=False)
class Child:
    id: ChildId
    slot: int
    incarnation: int
    generation: int  # of the code: HUP makes a new one
    spawned_at: float
    successor_of: ChildId | None = None
    state: ChildState = ChildState.STARTING
    pid: int = 0
    ready_at: float | None = None
    retire_at: float = inf  # max_child_age with jitter
    max_messages: int | None = None  # max_tasks_per_child, or less for those that started together
    retiring: bool = False  # takes no further message; ends when its hands are empty
    wearing: bool = False  # near the end of its messages: its successor may boot
    followed: bool = False  # its successor is READY and holds the slot
    retired: bool = False  # we asked it to end: its end is no death
    messages: int = 0
    delivery: Delivery | None = None
    deadline: float = 0.0  # of the state it is in: READY, exit, kill
    kill_cause: DeathCause | None = None
    termed: bool = False
    boot_error: str | None = None
    tree_bytes: int | None = None

    def move(self, state: ChildState) -> None:
        check_child(self.state, state)
        self.state = state

    @property
    def alive(self) -> bool:
        """Not given up and not gone."""
        return self.state not in (ChildState.UNKILLABLE, ChildState.GONE)

"""What all machines of the core share: the list of commands of this step, ids, randomness as a function."""

from __future__ import annotations

from collections.abc import Callable

from supervisor.core.commands import Answer, Command
from supervisor.core.happenings import Happening
from supervisor.core.settings import CoreSettings
from supervisor.core.types import ChildId, ClaimId, QueueName


class Context:
    """`uniform()` gives a number in [0, 1); it is injected, so that a seed reproduces every decision."""

    __slots__ = (
        "_child_ids",
        "_claim_ids",
        "acks_off",
        "commands",
        "draining",
        "held_bytes",
        "overlapping",
        "owners",
        "settings",
        "uniform",
    )

    def __init__(self, settings: CoreSettings, uniform: Callable[[], float]) -> None:
        self.settings = settings
        self.uniform = uniform
        self.commands: Answer = []
        self.held_bytes = 0  # bodies waiting in the parent
        self.overlapping = False  # some queue has two claims under way: only one at a time may
        self.draining = False  # no new work
        self.acks_off = False  # the grace period is over: what finishes now is not acknowledged
        self.owners: dict[ChildId, QueueName] = {}  # which queue a child belongs to
        self._child_ids = 0
        self._claim_ids = 0

    def do(self, command: Command) -> None:
        self.commands.append(command)

    def tell(self, happening: Happening) -> None:
        self.commands.append(happening)

    def take(self) -> Answer:
        """What was collected since the last call."""
        commands = self.commands
        self.commands = []
        return commands

    def next_child(self) -> ChildId:
        self._child_ids += 1
        return ChildId(self._child_ids)

    def next_claim(self) -> ClaimId:
        self._claim_ids += 1
        return ClaimId(self._claim_ids)

"""What the tables of the state machines allow, to be compared with what stories have taken."""

from __future__ import annotations

from supervisor.core import states


def every_step() -> set[tuple[str, str, str]]:
    """All that `states.exercised` can collect."""
    return {("delivery", before, after) for before, steps in states.DELIVERY.items() for after in steps} | {
        ("child", before, after) for before, steps in states.CHILD.items() for after in steps
    }

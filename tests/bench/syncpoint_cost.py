"""What a sync point costs that is off: `python tests/bench/syncpoint_cost.py [calls]`. Prints nanoseconds a call.

As the shell calls it, through the module and with the ids that most points give; below it an empty loop, to subtract.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared import syncpoints

ROUNDS = 100  # short ones: on a busy machine some of them are left alone


def bare(calls: int) -> None:
    """As a child's hot path calls it: bound once."""
    hit = syncpoints.hit
    for _ in range(calls):
        hit("child.handler.before")


def through_the_module(calls: int) -> None:
    """As the parent calls it."""
    for number in range(calls):
        syncpoints.hit("parent.dispatch.before", {"msg_id": number})


def nothing(calls: int) -> None:
    """The loop alone."""
    for _ in range(calls):
        pass


def cost_ns(work: Callable[[int], None], calls: int) -> float:
    """The best of some rounds, in time of this process: the one with the fewest neighbours."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time_ns()
        work(calls)
        found.append((time.process_time_ns() - began) / calls)
    return min(found)


def measure(calls: int) -> dict[str, float]:
    """Nanoseconds a call, without the loop."""
    loop = cost_ns(nothing, calls)
    return {
        "bound, without ids": round(cost_ns(bare, calls) - loop, 1),
        "through the module, with ids": round(cost_ns(through_the_module, calls) - loop, 1),
    }


def main() -> None:
    """Print the costs."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    for what, cost in measure(calls).items():
        print(f"{cost:6.1f} ns  {what}")


if __name__ == "__main__":
    main()

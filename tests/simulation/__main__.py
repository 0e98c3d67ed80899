"""Run the simulation: `python -m tests.simulation [--seed N] [--runs N] [--story]`."""

from __future__ import annotations

import argparse
import sys
import time

from supervisor.core import states
from tests.simulation.tables import every_step
from tests.simulation.world import Result, tell_story

_ENOUGH = 1500  # stories of this many seeds take every step of the state machines


def main() -> int:
    """Run seeds; 1 when an invariant does not hold, or when many stories leave a step of a state machine untried."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="The core in a simulated world.")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; alone, only this one is run")
    parser.add_argument("--runs", type=int, default=None, help="how many seeds (default: 1000, or 1 with --seed)")
    parser.add_argument("--tail", type=int, default=60, help="steps to show of a failing story")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds, also after a failure")
    args = parser.parse_args()
    first = 1 if args.seed is None else args.seed
    runs = args.runs or (1000 if args.seed is None else 1)
    began, steps, failed = time.monotonic(), 0, 0
    result: Result | None = None
    states.exercised = set()
    for seed in range(first, first + runs):
        result = tell_story(seed, tail=args.tail)
        steps += result.steps
        if result.violation is not None:
            failed += 1
            _show(result, brief=args.keep_going)
            if not args.keep_going:
                return 1
        if (seed - first + 1) % 100 == 0:
            print(f"{seed - first + 1} of {runs} seeds, {steps} steps, {time.monotonic() - began:.1f} s", flush=True)
    if runs == 1 and result is not None and not failed:
        print(f"seed {first}: story {result.number:08x}, {result.steps} steps")
    print(f"{runs - failed} of {runs} seeds hold, {steps} steps, {time.monotonic() - began:.1f} s")
    every = every_step()
    missing = sorted(every - states.exercised)
    print(f"{len(every) - len(missing)} of {len(every)} steps of the state machines taken")
    if runs >= _ENOUGH and missing:
        print("never taken: " + ", ".join(f"{machine} {before} -> {after}" for machine, before, after in missing))
        return 1
    return 1 if failed else 0


def _show(result: Result, *, brief: bool) -> None:
    if not brief:
        print("\n".join(result.tail))
    print(f"seed {result.seed}: story {result.number:08x}, {result.steps} steps: {result.violation}")
    if not brief:
        print(f"again: make sim SEED={result.seed}")


if __name__ == "__main__":
    sys.exit(main())

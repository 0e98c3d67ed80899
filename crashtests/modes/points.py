"""Mode *points*: each kill point of the failure model, for the child, the parent and both, in both modes.

Cases follow one another on one supervisor, which is started again when it was the victim; several such chains run at
the same time, because most of a case is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from crashtests.checker import Allowed, Finding, Verdict, check
from crashtests.ground import Ground
from crashtests.kill_points import Case
from crashtests.modes.one_case import CaseRun, run_case
from crashtests.nemesis import Order, Victim
from crashtests.scene import TRANSACTIONAL, scene, usual_queues

__all__ = ["ChainEnd", "run_points"]

Step = tuple[Case, Order | None]


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """What was found when the last supervisor of a chain had stopped: left-overs, and all rules over all messages."""

    cases: int
    findings: tuple[Finding, ...]


def run_points(
    ground: Ground,
    cases: Sequence[Case],
    *,
    runs: int = 1,
    both_orders: bool = True,
    workers: int = 4,
    tell: Callable[[CaseRun], None] = lambda _: None,
) -> tuple[list[CaseRun], list[ChainEnd]]:
    """Carry out every case `runs` times. `both_orders`: where both are killed in each order, so twice at least."""
    todo = [
        (case, _order(case, turn + number))
        for turn in range(max(runs, 2) if both_orders else runs)
        for number, case in enumerate(cases)
        if turn < runs or case.victim is Victim.BOTH
    ]
    chains = [todo[first::workers] for first in range(min(workers, len(todo)))]
    with ThreadPoolExecutor(max_workers=len(chains) or 1) as pool:
        ended = list(pool.map(lambda chain: _run_chain(ground, chain, tell), chains))
    place = {case.name: number for number, case in enumerate(cases)}
    found = [run for runs_of_chain, _ in ended for run in runs_of_chain]
    return sorted(found, key=lambda run: place[run.case.name]), [end for _, ends in ended for end in ends]


def _order(case: Case, turn: int) -> Order | None:
    if case.victim is not Victim.BOTH:
        return None
    return Order.CHILD_FIRST if turn % 2 == 0 else Order.PARENT_FIRST


def _run_chain(
    ground: Ground, chain: Sequence[Step], tell: Callable[[CaseRun], None]
) -> tuple[list[CaseRun], list[ChainEnd]]:
    """Case after case; one that went wrong gets a new scene behind it, so that it spoils no other."""
    runs: list[CaseRun] = []
    ends: list[ChainEnd] = []
    while len(runs) < len(chain):
        done, end = _run_on_one_scene(ground, chain[len(runs) :], tell)
        runs += done
        ends += [end] if end is not None else []
    return runs, ends


def _run_on_one_scene(
    ground: Ground, steps: Sequence[Step], tell: Callable[[CaseRun], None]
) -> tuple[list[CaseRun], ChainEnd | None]:
    """Until one goes wrong, or to the end of the chain and of its supervisor."""
    done: list[CaseRun] = []
    with ground.database() as dsn, scene(dsn, usual_queues()) as place:
        place.create_queues()
        for number, (case, order) in enumerate(steps):
            done.append(run_case(place, case, order, f"op-{number}"))
            tell(done[-1])
            if done[-1].verdict is not Verdict.OK:
                return done, None
        repeats = sum(case.runs - 1 for case, _ in steps)
        findings = check(place.truth(place.stage.stop()), Allowed(frozenset({TRANSACTIONAL}), repeats=repeats))
        return done, ChainEnd(len(done), tuple(findings))

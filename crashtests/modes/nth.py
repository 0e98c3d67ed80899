"""Mode *n-th*: whoever crosses the n-th sync point is killed there; n = 1, 2, ... until a run ends unkilled.

A small workload crosses every point of the registry: quick work, work that outlives a renewal, a death in regular and
in transactional mode. So each boundary is tried, those too that nobody has given a name. Which n stands for which point
is a matter of luck: where somebody was never killed, somebody is in the end, on purpose.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import psycopg

from crashtests.checker import Allowed, Finding, Verdict, check, count_repeats, worst
from crashtests.ground import Ground
from crashtests.processes import wait_until
from crashtests.rendezvous import Crossing, NotReached, Trap
from crashtests.scene import REGULAR, TRANSACTIONAL, Scene, scene, usual_queues
from shared.syncpoints import POINTS

__all__ = ["NthRun", "run_nth", "run_undisturbed"]

_END_S: Final = 90.0
_LIMIT: Final = 400
_SELF_INFLICTED: Final = 2  # repeats that the workload itself asks for
# A parent that polls an empty queue crosses points for ever: they do not count once there is nothing left to do.


@dataclass(frozen=True, slots=True)
class NthRun:
    """One run. `at` None: it ended before anybody crossed the n-th point. `aimed`: only this point counted."""

    n: int
    at: Crossing | None
    verdict: Verdict
    repeats: int
    findings: tuple[Finding, ...] = ()
    aimed: str | None = None

    @property
    def name(self) -> str:
        """As a run is called in reports."""
        return f"n = {self.n}" if self.aimed is None else f"{self.aimed}, n = {self.n}"


def send_workload(place: Scene) -> None:
    """What crosses every point."""
    place.create_queues()
    place.send(REGULAR, "quick")
    place.send(REGULAR, "outlives a renewal", sleep_ms=2200)
    place.send(REGULAR, "dies once", ends="kill")
    place.send(TRANSACTIONAL, "quick in a transaction")
    place.send(TRANSACTIONAL, "dies once in a transaction", ends="exit")


def run_nth(
    ground: Ground,
    *,
    workers: int = 4,
    first: int = 1,
    limit: int = _LIMIT,
    each_point: bool = False,
    tell: Callable[[NthRun], None] = lambda _: None,
) -> list[NthRun]:
    """Run n = first, first + 1, ... at the same time, until one of them ends unkilled.

    `each_point`: kill afterwards whoever comes first to a point of the registry at which nobody was killed.
    """
    runs: list[NthRun] = []
    numbers: Iterator[int] = itertools.islice(itertools.count(first), limit)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting: list[Future[NthRun]] = [pool.submit(_run, ground, n) for n in itertools.islice(numbers, workers)]
        while waiting:
            run = waiting.pop(0).result()
            runs.append(run)
            tell(run)
            unkilled = run.at is None and run.verdict is not Verdict.UNKNOWN
            if not unkilled and (n := next(numbers, None)) is not None:
                waiting.append(pool.submit(_run, ground, n))
            elif unkilled:
                numbers = iter(())
        left = sorted(POINTS - {run.at.point for run in runs if run.at is not None}) if each_point else []
        runs.sort(key=lambda run: run.n)
        for run in pool.map(lambda point: _run(ground, 1, point), left):
            runs.append(run)
            tell(run)
    return runs


def run_undisturbed(ground: Ground) -> tuple[NthRun, list[Crossing]]:
    """The workload without a kill, and every crossing."""
    with ground.database() as dsn, scene(dsn, usual_queues()) as place:
        send_workload(place)
        place.stage.start()
        return _end(place, 0, None), place.points.crossings


def _run(ground: Ground, n: int, aimed: str | None = None) -> NthRun:
    try:
        with ground.database() as dsn, scene(dsn, usual_queues()) as place:
            send_workload(place)
            trap = place.points.trap(*([aimed] if aimed else []), nth=n)
            place.stage.start()
            killed = _kill_who_comes(place, trap)
            return replace(_end(place, n, killed), aimed=aimed)
    except (NotReached, psycopg.Error, OSError) as error:
        return NthRun(n, None, Verdict.UNKNOWN, 0, (Finding(Verdict.UNKNOWN, "scenario", repr(error)),), aimed)


def _kill_who_comes(place: Scene, trap: Trap) -> Crossing | None:
    """Kill who stands at the n-th point; None where all is done before anybody comes there."""
    wait_until(lambda: trap.caught or place.wait_ended(place.sent, 0.0), _END_S)
    if not trap.caught:
        place.points.disarm()
        return None
    with contextlib.closing(trap.wait(0.0)) as meeting:
        meeting.process.kill()
        meeting.process.wait_gone(10.0)
        if meeting.crossing.process == "parent":
            left = place.stage.wait_for_silence(10.0)
            if left:
                raise NotReached(f"{len(left)} processes outlive their supervisor")
        return meeting.crossing


def _end(place: Scene, n: int, killed: Crossing | None) -> NthRun:
    """Start again what was killed, wait until all is done, stop, and check everything."""
    place.stage.start()
    place.wait_ended(place.sent, _END_S)
    if killed is not None:
        _wait_for_new_life(place)
    truth = place.truth(place.stage.stop())
    # A kill hits one message at most, a parent's those of both queues.
    repeats = _SELF_INFLICTED + (0 if killed is None else 1 if killed.process != "parent" else 2)
    findings = check(truth, Allowed(frozenset({TRANSACTIONAL}), repeats=repeats))
    return NthRun(n, killed, worst(findings), count_repeats(truth), tuple(findings))


def _wait_for_new_life(place: Scene) -> None:
    """A supervisor that has only just been started is not stopped but killed by TERM."""
    own = place.stage.parent.pid

    def looked(crossings: Sequence[Crossing]) -> bool:
        return any(crossing.pid == own for crossing in crossings)

    wait_until(lambda: looked(place.points.crossings), _END_S)

"""All trials of a handler: undisturbed first, then every kill point, then its own lines.

watch (plain)   ─▶ what effects there are when nothing happens, and which of them the transaction hides
watch (wrapped) ─▶ the lines of the handler, in order
kill, kill, ... ─▶ judged one by one
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg

from crashtests.ground import Ground
from crashtests.kill_points import CASES, Mode, Point
from crashtests.nemesis import Victim
from crashtests.rendezvous import NotReached
from crashtests.users.judge import Judged, Kind, judge
from crashtests.users.probe import Counts, Probe, ProbeFailed
from crashtests.users.trial import End, Place, Seen, Subject, Theatre, theatre

__all__ = ["NoUse", "Outcome", "choose_lines", "try_handler"]

_IDS_APART = 1_000_000


class NoUse(Exception):
    """Nothing can be learned: the handler does not run, or the probe sees nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was learned."""

    expected: Counts
    inside: frozenset[str]
    judged: tuple[Judged, ...]


def try_handler(
    ground: Ground,
    subject: Subject,
    probe: Probe,
    *,
    lines: int,
    workers: int,
    only: str = "",
    tell: Callable[[Judged], None] = lambda _: None,
) -> Outcome:
    """Try everything. Raises `NoUse`."""
    with ground.database() as dsn, theatre(dsn, subject, probe, wrapped=False) as stand:
        seen = _watch(stand, subject)
    expected = {name: count for name, count in seen.counts.items() if count > 0}
    if not expected:
        raise NoUse("the probe counts no effect of an undisturbed message: look at what it looks at")
    hidden = seen.between or {}
    inside = frozenset(
        name for name in expected if subject.mode is Mode.TRANSACTIONAL and hidden.get(name, 0) < expected[name]
    )
    with ground.database() as dsn, theatre(dsn, subject, probe, wrapped=True) as stand:
        wanted = lines if only in Point.DURING else 0
        places = [place for place in _places(subject.mode, _lines(stand, wanted), wanted) if only in place.point]
    parts = [places[first::workers] for first in range(min(workers, len(places)))]

    def work(number: int) -> list[Judged]:
        return _run_part(ground, subject, probe, parts[number], number, expected, inside, tell)

    with ThreadPoolExecutor(max_workers=len(parts) or 1) as pool:
        judged = [one for some in pool.map(work, range(len(parts))) for one in some]
    order = {id(place): number for number, place in enumerate(places)}
    return Outcome(expected, inside, tuple(sorted(judged, key=lambda one: order[id(one.place)])))


def _watch(stand: Theatre, subject: Subject) -> Seen:
    hold_at = "child.tx.before_commit" if subject.mode is Mode.TRANSACTIONAL else None
    try:
        seen = stand.watch(hold_at=hold_at)
    except NotReached as error:
        code = stand.scene.stage.exit_code()
        why = f"the supervisor ended with exit code {code}" if code is not None else str(error)
        raise NoUse(f"an undisturbed message was not handled: {why}\n{stand.scene.stage.log_tail()}") from error
    if seen.end is not End.ACKNOWLEDGED:
        raise NoUse(f"an undisturbed message is {seen.end}\n{stand.scene.stage.log_tail()}")
    return seen


def _lines(stand: Theatre, wanted: int) -> list[str]:
    if not wanted:
        return []
    try:
        return stand.lines()
    except NotReached:
        return []


def choose_lines(places: Sequence[str], most: int) -> list[tuple[int, str]]:
    """(position, place) of at most `most` lines, evenly spread; of one that runs often its first and last run."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, place in enumerate(places, start=1):
        first.setdefault(place, position)
        last[place] = position
    found = sorted({(position, place) for ends in (first, last) for place, position in ends.items()})
    if len(found) <= most:
        return found
    step = (len(found) - 1) / max(1, most - 1)
    return [found[round(number * step)] for number in range(most)]


def _places(mode: Mode, run: Sequence[str], most: int) -> list[Place]:
    places = [
        Place(str(case.point), case.victim, case.at)
        for case in CASES
        if case.mode is mode and case.point is not Point.DURING
    ]
    chosen = choose_lines(run, most)
    during = [Place(str(Point.DURING), Victim.CHILD, "handler.line", line, text) for line, text in chosen]
    if chosen:
        line, text = chosen[len(chosen) // 2]
        during += [Place(str(Point.DURING), v, "handler.line", line, text) for v in (Victim.PARENT, Victim.BOTH)]
    else:
        during += [Place(str(Point.DURING), victim, "child.handler.before") for victim in Victim]
    before = [place for place in places if place.point in (Point.BEFORE_CLAIM, Point.AFTER_CLAIM)]
    return before + during + places[len(before) :]


def _run_part(
    ground: Ground,
    subject: Subject,
    probe: Probe,
    places: Sequence[Place],
    number: int,
    expected: Counts,
    inside: frozenset[str],
    tell: Callable[[Judged], None],
) -> list[Judged]:
    """Place after place; after one that went wrong everything is made anew."""
    done: list[Judged] = []
    for turn in itertools.count():
        if len(done) == len(places):
            return done
        first_id = 1 + _IDS_APART * (number * len(places) + turn)
        with ground.database() as dsn, theatre(dsn, subject, probe, wrapped=True, first_id=first_id) as stand:
            for place in places[len(done) :]:
                done.append(_try(stand, place, expected, inside))
                tell(done[-1])
                if done[-1].kind is Kind.UNKNOWN:
                    break
            with contextlib.suppress(psycopg.Error):
                stand.scene.stage.stop()
    return done


def _try(stand: Theatre, place: Place, expected: Counts, inside: frozenset[str]) -> Judged:
    try:
        return judge(place, stand.kill(place, enough=expected), expected=expected, inside=inside)
    except (NotReached, ProbeFailed, psycopg.Error, OSError) as error:
        return Judged(place, Kind.UNKNOWN, None, f"{type(error).__name__}: {error}")

"""The sync points as the harness meets them in a running supervisor."""

from __future__ import annotations

import pytest

from crashtests.checker import Verdict
from crashtests.ground import Ground
from crashtests.modes.nth import run_nth, run_undisturbed
from shared import syncpoints

pytestmark = pytest.mark.timeout(300)


def test_every_registered_point_is_hit(crash_ground: Ground) -> None:
    """A small workload crosses all of them, and ends as if nobody had looked."""
    run, crossings = run_undisturbed(crash_ground)
    assert run.verdict is Verdict.OK, run.findings
    assert {crossing.point for crossing in crossings} == syncpoints.POINTS
    assert {crossing.process for crossing in crossings} == {"parent", "child"}


def test_visits_are_counted_by_process_and_point(crash_ground: Ground) -> None:
    """Each process counts from 1, so that "the third time" means something."""
    _, crossings = run_undisturbed(crash_ground)
    seen: dict[tuple[int, str], int] = {}
    for crossing in crossings:
        seen[crossing.pid, crossing.point] = seen.get((crossing.pid, crossing.point), 0) + 1
        assert crossing.visit == seen[crossing.pid, crossing.point]


@pytest.mark.parametrize("first", [11, 34])
def test_who_crosses_the_nth_point_may_be_killed_there(crash_ground: Ground, first: int) -> None:
    """Two samples of the n-th mode, whichever point they hit: everything ends once."""
    runs = run_nth(crash_ground, workers=2, first=first, limit=2)
    assert len(runs) == 2
    for run in runs:
        assert run.at is not None
        assert run.verdict is Verdict.OK, (run.at, run.findings)

"""The sync points as the harness meets them in a running supervisor."""

from __future__ import annotations

import pytest

from crashtests import summaries
from crashtests.checker import Verdict
from crashtests.ground import Ground
from crashtests.modes.nth import NthRun, run_nth, run_undisturbed
from crashtests.rendezvous import Crossing
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


def test_where_nobody_was_killed_by_number_somebody_is_on_purpose(
    crash_ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No point of the registry is left to luck."""
    monkeypatch.setattr("crashtests.modes.nth.POINTS", frozenset({"parent.renew.after", "child.tx.after_commit"}))
    runs = run_nth(crash_ground, workers=2, first=1, limit=1, each_point=True)
    assert [(run.n, run.aimed) for run in runs] == [(1, None), (1, "child.tx.after_commit"), (1, "parent.renew.after")]
    assert [run.at.point for run in runs[1:] if run.at is not None] == [run.aimed for run in runs[1:]]
    assert [run.findings for run in runs] == [()] * 3


def test_a_point_at_which_nobody_was_killed_is_no_success() -> None:
    """The part is not ok, and names it."""
    runs = [
        NthRun(n, Crossing(point.partition(".")[0], point, 1, 10, {}), Verdict.OK, 0)
        for n, point in enumerate(sorted(syncpoints.POINTS), start=1)
    ]
    assert summaries.of_nth(runs).ok
    left_out = summaries.of_nth([run for run in runs if run.at is not None and run.at.point != "parent.renew.after"])
    assert left_out.problems == ["unknown: nobody was killed at parent.renew.after"]
    assert f"{len(syncpoints.POINTS) - 1} of {len(syncpoints.POINTS)}" in left_out.summary.values()

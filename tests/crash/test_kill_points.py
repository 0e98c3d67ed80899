"""Every row of the failure model's table of kill points, once: six points, three victims, two modes."""

from __future__ import annotations

import pytest

from crashtests.checker import Verdict
from crashtests.ground import Ground
from crashtests.kill_points import CASES, Mode, Point
from crashtests.modes.points import run_points
from crashtests.nemesis import Order, Victim

pytestmark = pytest.mark.timeout(600)


def test_the_table_is_whole() -> None:
    """Each point, for each victim, in each mode, exactly once."""
    rows = [(case.point, case.victim, case.mode) for case in CASES]
    assert len(set(rows)) == len(rows)
    assert set(rows) == {(point, victim, mode) for point in Point for victim in Victim for mode in Mode}


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("victim", Victim)
def test_a_kill_at_each_point_leads_to_what_the_failure_model_says(
    crash_ground: Ground, victim: Victim, mode: Mode
) -> None:
    """Row, accounts, delivery and duplicates are those of its row; and in the end nothing stays behind."""
    cases = [case for case in CASES if case.victim is victim and case.mode is mode]
    runs, ends = run_points(crash_ground, cases, both_orders=False, workers=2)
    wrong = [
        f"{run.verdict}: {run.case.name}: {run.seen}, expected {run.case.expected}\n" + "\n".join(run.problems)
        for run in runs
        if run.verdict is not Verdict.OK
    ]
    assert not wrong, "\n".join(wrong)
    assert [run.case for run in runs] == cases
    assert {run.order for run in runs} == (set(Order) if victim is Victim.BOTH else {None})
    assert sum(end.cases for end in ends) == len(runs)
    assert [end.findings for end in ends] == [()] * len(ends)

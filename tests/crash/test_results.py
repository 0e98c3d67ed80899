"""What is written down of runs: parts that are added to, and what they say that they were run with."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from crashtests.checker import Finding, Verdict
from crashtests.cli import app
from crashtests.generator import FaultKind, tell_story
from crashtests.modes.random_kills import RandomRun, run_random
from crashtests.results import Part, load, save
from crashtests.summaries import of_random


def lived(seed: int, *findings: Finding) -> RandomRun:
    """A story as if it had been lived through."""
    story = tell_story(seed)
    verdict = findings[0].verdict if findings else Verdict.OK
    return RandomRun(story, verdict, 30, seed, 1, 0.0, findings)


def test_runs_that_are_added_make_the_same_part_as_all_at_once() -> None:
    """Figures, rows and problems: a night in two halves is a night."""
    lost = Finding(Verdict.FAIL, "lost", "op-1")
    runs = [lived(seed, *([lost] if seed in {2, 5} else [])) for seed in range(1, 8)]
    whole, first = of_random(runs), of_random(runs[:3])
    both = of_random(runs[3:], first)
    assert both.to_json() == whole.to_json()
    assert both.summary["runs"] == "7, seeds 1 to 7"
    assert (both.summary["lost"], len(both.problems), both.ok) == (2, 2, False)
    assert sum(row["times"] for row in both.rows) == sum(len(run.story.faults) for run in runs)
    assert {row["fault"] for row in both.rows} == set(FaultKind)


def test_what_was_added_to_is_what_was_stored(tmp_path: Path) -> None:
    """Also by way of the file."""
    runs = [lived(seed) for seed in range(1, 5)]
    save(tmp_path / "report.json", {"random": of_random(runs[:2])})
    stored = load(tmp_path / "report.json")["random"]
    assert of_random(runs[2:], stored).to_json() == of_random(runs).to_json()


def test_no_story_begins_when_the_time_is_over() -> None:
    """And none is claimed."""
    assert run_random(range(1, 4), workers=1, seconds=0.0) == []
    assert of_random([]).summary["runs"] == 0


@pytest.mark.parametrize("stored", [False, True], ids=["no report", "other code"])
def test_only_runs_of_the_same_code_are_added(tmp_path: Path, stored: bool) -> None:
    """Otherwise the report would say of some code what was seen of another."""
    report = tmp_path / "report.md"
    if stored:
        part: Part = of_random([lived(1)])
        part.stamp({"commit": "0123456789"})
        save(tmp_path / "report.json", {"random soak": part})
    done = CliRunner().invoke(app, ["random", "--report", str(report), "--more"])
    assert done.exit_code == 2
    assert "--more" in done.output
    assert not report.exists()

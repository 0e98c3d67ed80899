"""Mode random: the same seed tells the same story, and stories end well."""

from __future__ import annotations

import pytest

from crashtests.checker import Verdict
from crashtests.generator import FaultKind, tell_story
from crashtests.modes.random_kills import run_random

pytestmark = pytest.mark.timeout(600)


def test_the_same_seed_tells_the_same_story() -> None:
    """To the last message and the last millisecond."""
    assert [tell_story(seed) for seed in range(50)] == [tell_story(seed) for seed in range(50)]
    assert len({tell_story(seed).text() for seed in range(50)}) == 50


def test_every_kind_of_fault_is_in_some_story() -> None:
    """Within the seeds that a soak lives through."""
    assert {fault.kind for seed in range(1, 501) for fault in tell_story(seed).faults} == set(FaultKind)


def test_stories_end_well() -> None:
    """A story with a killed parent, and one with a killed PostgreSQL: nothing lost, no ack of unfinished work."""
    seeds = [_first_seed_with({FaultKind.PARENT, FaultKind.CHILD}), _first_seed_with({FaultKind.BACKEND})]
    for run in run_random(seeds, workers=2):
        assert run.verdict is Verdict.OK, (run.story.text(), run.findings, run.log)


def _first_seed_with(kinds: set[FaultKind]) -> int:
    return next(seed for seed in range(1, 10_000) if {fault.kind for fault in tell_story(seed).faults} == kinds)

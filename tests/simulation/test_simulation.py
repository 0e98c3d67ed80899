"""The core in a simulated world: what must hold, holds in every story; one seed tells one story."""

from __future__ import annotations

import pytest

from supervisor.core import states
from tests.simulation.tables import every_step
from tests.simulation.world import Result, tell_story

SEEDS = range(1, 151)
BLOCK = 15
MOST = 1_500


class Campaign:
    """Tells each story once, and remembers the steps of the state machines that were taken in all of them."""

    def __init__(self) -> None:
        self._results: dict[int, Result] = {}
        self.steps: set[tuple[str, str, str]] = set()

    def tell(self, seed: int) -> Result:
        """Give the result of a seed."""
        if seed not in self._results:
            states.exercised = set()
            try:
                self._results[seed] = tell_story(seed)
                self.steps |= states.exercised
            finally:
                states.exercised = None
        return self._results[seed]


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    """Share the stories between the tests of this module."""
    return Campaign()


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, BLOCK))
def test_invariants_hold_whatever_happens(campaign: Campaign, first: int) -> None:
    """Safety under faults, then liveness without them, then a clean stop; `make sim SEED=n` tells a story again."""
    broken = [
        f"make sim SEED={result.seed}: {result.violation}"
        for result in map(campaign.tell, range(first, min(first + BLOCK, SEEDS.stop)))
        if result.violation is not None
    ]
    assert not broken, "\n".join(broken)


def test_every_step_of_the_state_machines_is_taken(campaign: Campaign) -> None:
    """A step that no story takes is either impossible, and does not belong into the table, or is never tried."""
    missing = every_step()
    for seed in range(SEEDS.start, MOST):  # nearly always the first ones are enough
        if not missing:
            break
        campaign.tell(seed)
        missing -= campaign.steps
    assert sorted(missing) == []


@pytest.mark.parametrize("seed", [7, 50])
def test_a_seed_tells_the_same_story_again(campaign: Campaign, seed: int) -> None:
    """A failure can be looked at as often as it takes."""
    assert tell_story(seed).number == campaign.tell(seed).number


def test_different_seeds_tell_different_stories(campaign: Campaign) -> None:
    """The number names the story."""
    assert len({campaign.tell(seed).number for seed in range(1, 31)}) == 30

"""Mode network: what happens between supervisor and PostgreSQL when statements or their answers get lost."""

from __future__ import annotations

import pytest

from crashtests.checker import Verdict
from crashtests.ground import Ground
from crashtests.modes.network import SCENARIOS, run_network

pytestmark = pytest.mark.timeout(600)

# Those whose outcome is certain; the ones under load belong to `make crash`.
CERTAIN = [scenario for scenario in SCENARIOS if "swallowed" in scenario.name or "never arrives" in scenario.name]


def test_lost_statements_and_lost_answers(crash_ground: Ground) -> None:
    """COMMIT, ack, claim, reckoning, renewal: said again or decided by the row, and never done twice."""
    runs = run_network(crash_ground, CERTAIN, workers=4)
    assert len(runs) == len(CERTAIN) == 8
    for run in runs:
        assert run.verdict is Verdict.OK, (run.scenario.name, run.findings, run.log)
        assert run.repeats == run.scenario.repeats, run.scenario.name

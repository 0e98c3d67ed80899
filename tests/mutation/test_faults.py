"""The faults can still be put in, and the tests that are asked are there."""

from __future__ import annotations

import pytest

from tests.mutation.faults import FAULTS, SIMULATION, Fault
from tests.mutation.tree import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_code(fault: Fault) -> None:
    """Its text occurs exactly once. Whoever changes the code changes the fault with it, or `make mutants` is blind."""
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.old != fault.new


def test_who_is_asked_is_there() -> None:
    """Paths of tests, or the simulator."""
    asked = {tests for fault in FAULTS for tests in fault.tests} - {SIMULATION}
    assert {tests for tests in asked if not (ROOT / tests).exists()} == set()


def test_names_are_unique() -> None:
    """They are the rows of the table."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)

"""The tables of the state machines, and the page that is generated from them."""

from __future__ import annotations

import pytest

from supervisor.core.states import (
    CHILD,
    DELIVERY,
    ChildState,
    DeliveryState,
    IllegalTransition,
    check_child,
    check_delivery,
)
from tests.tools.diagrams import TARGET, render


def test_the_page_is_up_to_date() -> None:
    """docs/state-machines.md is what `python -m tests.tools.diagrams` writes."""
    assert TARGET.read_text(encoding="utf-8") == render()


def test_every_state_has_its_row() -> None:
    """A table with a missing row would refuse every step by a KeyError."""
    assert set(DELIVERY) == set(DeliveryState)
    assert set(CHILD) == set(ChildState)


def test_a_step_that_is_not_in_a_table_is_refused() -> None:
    """The core stops rather than guess."""
    with pytest.raises(IllegalTransition, match="delivery: ended -> running"):
        check_delivery(DeliveryState.ENDED, DeliveryState.RUNNING)
    with pytest.raises(IllegalTransition, match="child: gone -> idle"):
        check_child(ChildState.GONE, ChildState.IDLE)

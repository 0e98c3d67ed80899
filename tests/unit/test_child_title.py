"""Titles where the memory of the command line is not what was expected: the library says them, each time."""

from __future__ import annotations

import pytest

from child import title
from child.title import Title


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library was asked to show; it shows nothing."""
    shown: list[str] = []
    monkeypatch.setattr(title, "_set", shown.append)
    return shown


def test_a_title_that_does_not_stand_in_the_command_line_is_said_by_the_library(said: list[str]) -> None:
    """Nothing is written into memory that is not known to be the title's."""
    it = Title("orders", 3, on=True)
    it.show_starting()
    it.show_message(2**63 - 1, 2)
    it.show_claiming()
    it.show_idle()
    assert said == [
        f"pgmq-child orders[3] {what}" for what in ("starting", f"#{2**63 - 1} attempt 2", "claiming", "idle")
    ]


def test_titles_can_be_off(said: list[str]) -> None:
    """Then the library is not called."""
    it = Title("orders", 3, on=False)
    it.show_starting()
    it.show_message(1, 1)
    it.show_idle()
    assert said == []


def test_every_title_has_room() -> None:
    """The longest one leaves an end."""
    assert len(b"#%d attempt %d" % (-(2**63), 2**31 - 1)) < title._LONGEST_TAIL_BYTES

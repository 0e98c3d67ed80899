"""Texts that must fit into a dead letter."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text import CUT_MARKER, clean_text

ANY_TEXT = st.text(st.characters(codec=None))


@given(ANY_TEXT, st.integers(min_value=0, max_value=80))
def test_any_text_becomes_one_that_jsonb_takes(text: str, limit: int) -> None:
    """No NUL, no lone surrogate, never longer than the limit in UTF-8."""
    clean = clean_text(text, limit)
    assert len(clean.encode("utf-8")) <= limit
    assert "\x00" not in clean
    json.dumps(clean, ensure_ascii=False).encode("utf-8")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00")))
def test_good_text_stays_as_it_is(text: str) -> None:
    """What needs no cleaning is not touched."""
    assert clean_text(text) == text


@given(st.binary())
def test_any_bytes_become_text(data: bytes) -> None:
    """Output of a dying process may be cut anywhere."""
    clean_text(data).encode("utf-8")


def test_a_long_text_is_cut_at_a_character_and_says_so() -> None:
    """The cut falls between characters, and the marker counts."""
    clean = clean_text("é" * 100, 50)
    assert clean.endswith(CUT_MARKER)
    assert len(clean.encode()) in (49, 50)
    assert "\ufffd" not in clean


def test_surrogates_are_joined_or_replaced() -> None:
    """A pair that was split is joined; a lone one is replaced by one character."""
    assert clean_text("a\ud83d\ude00b\udc80c\x00d") == "a\U0001f600b\ufffdcd"


class Exits:
    """Its text cannot be had."""

    def __str__(self) -> str:
        """End the process, if it is let."""
        raise SystemExit(1)


class Pretends(str):
    """A text whose methods lie."""

    __slots__ = ()

    def __str__(self) -> str:
        """Raise instead of answering."""
        raise RuntimeError

    def replace(self, *_: Any) -> str:
        """Raise instead of answering."""
        raise RuntimeError

    def __len__(self) -> int:
        """Lie."""
        return 0


class NamedByForce(type):
    """A type that does not tell its name."""

    __name__ = property(lambda _: 1 / 0)  # type: ignore[assignment] # hostile on purpose


class Nameless(metaclass=NamedByForce):
    """Neither text nor name."""

    __str__ = Exits.__str__


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Exits(), "<Exits that cannot be shown>"),
        (Pretends("real\x00"), "real"),
        (Nameless(), "<object that cannot be shown>"),
        (None, "None"),
        (memoryview(b"ab"), "ab"),
    ],
)
def test_hostile_objects_are_shown_somehow(value: Any, shown: str) -> None:
    """Nothing that an object does makes the cleaning raise."""
    assert clean_text(value) == shown

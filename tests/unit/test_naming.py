"""Queue names and what is derived from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ValidationError
from shared.naming import (
    MAX_NAME_BYTES,
    a_table,
    dead_letter_queue_name,
    is_queue_name,
    notify_channel,
    q_table,
    validate_queue_name,
)

NAMES = st.from_regex(r"[a-z0-9_]{1,47}", fullmatch=True)


@given(NAMES)
def test_names_of_the_contract_are_accepted(name: str) -> None:
    """Lower-case ASCII letters, digits and underscores up to 47 bytes are a name."""
    validate_queue_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Orders", "upper-case"),
        ("größe", "ASCII"),
        ("٣", "ASCII"),
        ("x" * 48, "48 bytes"),
        ("a-b", "'-'"),
        ("a b", "white space"),
        ("a\n", "white space"),
        ('a"b', "quote"),
        ("a'b", "quote"),
        ("a.b", "'.'"),
        ("a\x00", "character"),
        ("\ud800", "ASCII"),
        ("", "empty"),
        (7, "not text"),
    ],
)
def test_other_names_are_refused_with_the_reason_and_a_remedy(name: str, reason: str) -> None:
    """A bad name is refused, and the error says why and what to do."""
    with pytest.raises(ValidationError, match=reason) as caught:
        validate_queue_name(name)
    assert caught.value.remedy
    assert not is_queue_name(name)


@given(st.text(max_size=60))
def test_any_text_is_accepted_or_refused_with_our_error(name: str) -> None:
    """No text makes the validation itself fail, and the message is plain ASCII in bounds."""
    if is_queue_name(name):
        validate_queue_name(name)
        return
    with pytest.raises(ValidationError) as caught:
        validate_queue_name(name)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 400


@given(NAMES)
def test_a_dead_letter_queue_has_a_name_of_its_own_that_fits(name: str) -> None:
    """The derived name is a queue name too, and never the source."""
    derived = dead_letter_queue_name(name)
    validate_queue_name(derived)
    assert derived != name
    assert len(derived) == min(len(name) + 4, MAX_NAME_BYTES)


def test_long_names_get_a_stable_hash() -> None:
    """Up to 43 bytes `_dlq` is appended; beyond, the hash that is written down here is never to change."""
    assert dead_letter_queue_name("x" * 43) == "x" * 43 + "_dlq"
    assert dead_letter_queue_name("x" * 44) == "x" * 26 + "_dlq_9f9b0f01f6d6ae34"
    assert dead_letter_queue_name("x" * 44) != dead_letter_queue_name("x" * 45)


def test_names_of_pgmq_are_derived() -> None:
    """Tables and the channel follow PGMQ's own rules."""
    assert (q_table("orders"), a_table("orders")) == ("q_orders", "a_orders")
    assert notify_channel("orders") == "pgmq.q_orders.INSERT"

"""The proxy's reading of the protocol."""

from __future__ import annotations

import struct

import pytest

from crashtests.wiretap import Answers, Statements


def startup(code: int = 196608) -> bytes:
    """Make a first message."""
    return struct.pack("!II", 8, code)


def message(kind: bytes, payload: bytes) -> bytes:
    """Make a message."""
    return kind + struct.pack("!I", len(payload) + 4) + payload


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_statements_are_read_whatever_the_pieces(step: int) -> None:
    """Simple queries and parsed ones, after a refused request for encryption."""
    said = startup(80877103) + startup() + message(b"Q", b"commit\0")
    said += message(b"P", b"\0select $1\0\0\0") + message(b"B", b"\0\0") + message(b"S", b"")
    reader = Statements()
    found = [text for at in range(0, len(said), step) for text in reader.feed(said[at : at + step])]
    assert found == ["commit", "select $1"]


def test_a_prepared_statement_is_said_when_it_is_bound() -> None:
    """As often as it is, and not when it is prepared."""
    reader = Statements()
    assert reader.feed(startup() + message(b"P", b"name\0select $1\0\0\0") + message(b"S", b"")) == []
    assert reader.feed(message(b"B", b"\0name\0") + message(b"B", b"\0name\0")) == ["select $1"] * 2


def test_the_end_of_an_answer_is_seen() -> None:
    """ReadyForQuery, after the single byte that refuses encryption."""
    statements = Statements()
    statements.feed(startup(80877103))
    answers = Answers(statements)
    assert not answers.feed(b"N")
    assert not answers.feed(message(b"C", b"COMMIT\0"))
    assert answers.feed(message(b"Z", b"I"))
    assert not statements.opaque


def test_tls_is_passed_on_unread() -> None:
    """After the server's yes nobody can tell."""
    statements = Statements()
    statements.feed(startup(80877103))
    assert not Answers(statements).feed(b"S")
    assert statements.opaque
    assert statements.feed(b"anything") == []

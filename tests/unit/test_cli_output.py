"""Tables in a pipe, and what may not reach a terminal."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from supervisor.cli.output import Column, print_json, print_table, printable

COLUMNS = [Column("name", "queue"), Column("count", "in flight", "right")]


def test_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe a table is aligned text with one header line, titles without spaces, and a dash for nothing."""
    print_table(COLUMNS, [{"name": "orders", "count": 7}, {"name": "a", "count": None}], empty="nothing")
    assert capsys.readouterr().out == "QUEUE   IN_FLIGHT\norders          7\na               -\n"


def test_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rows stdout has the header alone; the sentence for people is on stderr."""
    print_table(COLUMNS, [], empty="no queues")
    captured = capsys.readouterr()
    assert captured.out == "QUEUE  IN_FLIGHT\n"
    assert captured.err == "no queues\n"


def test_control_characters_are_spelled_out() -> None:
    """Text from a message cannot steer the terminal that shows it."""
    assert printable("a\x1b[2Jb\nc\x9b") == "a\\x1b[2Jb\\x0ac\\x9b"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON keeps text as it is, and writes what JSON does not know as text."""
    print_json({"name": "ö", "at": datetime(2024, 1, 1, tzinfo=UTC)})
    assert json.loads(capsys.readouterr().out) == {"name": "ö", "at": "2024-01-01 00:00:00+00:00"}

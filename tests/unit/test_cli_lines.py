"""Lines of standard input, in batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from supervisor.cli.lines import Batch, read_batches


@contextmanager
def pipe_of(data: bytes) -> Iterator[int]:
    """Give the reading end of a pipe through which `data` comes, then its end."""
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as end:
            end.write(data)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield reading
    finally:
        os.close(reading)
        feeder.join()


def batches(data: bytes, **limits: int) -> list[Batch]:
    """Read everything."""
    with pipe_of(data) as fd:
        return list(read_batches(fd, **limits))


def numbered(found: list[Batch]) -> list[tuple[int, str]]:
    """Join the batches."""
    return [pair for batch in found for pair in zip(batch.numbers, batch.bodies, strict=True)]


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n \n"])
def test_lines_keep_their_numbers(end: bytes) -> None:
    """Empty lines are skipped and counted; the last line needs no end."""
    assert numbered(batches(b'{"a": 1}\n\n[2]\r\n  3' + end)) == [(1, '{"a": 1}'), (3, "[2]\r"), (4, "  3")]


def test_batches_are_bounded() -> None:
    """A batch has at most so many lines, and ends once it has so many bytes."""
    data = b"".join(b"%d\n" % number for number in range(25))
    assert [len(batch.bodies) for batch in batches(data, max_lines=10)] == [10, 10, 5]
    assert [len(batch.bodies) for batch in batches(b"111111\n2222\n3\n", max_bytes=8)] == [2, 1]
    assert numbered(batches(data, max_lines=10)) == [(number + 1, str(number)) for number in range(25)]


def test_unreadable_lines_are_reported_by_number() -> None:
    """What is not UTF-8, or has a NUL, is refused alone; the lines around it go on."""
    found = batches(b'1\n"\xff"\n"\x00"\n4\n')
    assert numbered(found) == [(1, "1"), (4, "4")]
    assert found[0].refused == [(2, "is not UTF-8 at byte 2"), (3, "has a NUL byte")]


def test_long_lines_are_put_together() -> None:
    """A line that comes in many pieces is one line."""
    body = '"' + "x" * (3 << 20) + '"'
    assert numbered(batches(f"{body}\n1\n".encode())) == [(1, body), (2, "1")]


def test_a_pausing_producer_is_not_held_back() -> None:
    """What was written is given although the batch is not full and the input is not at its end."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"1\n2\n")
        assert next(iter(read_batches(reading))).bodies == ["1", "2"]
    finally:
        os.close(reading)
        os.close(writing)


def test_nothing() -> None:
    """An empty input has no batch."""
    assert batches(b"") == []


def test_byte_order_mark() -> None:
    """A byte order mark before the first line is no part of it."""
    assert numbered(batches(b"\xef\xbb\xbf1\n")) == [(1, "1")]

"""Requests: what is said, with what, and how answers are read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shared.errors import ProtocolError, ValidationError
from shared.pgmq import operations
from shared.pgmq.sqlstate import Moment
from shared.pgmq.statements import client, queues

ROW = (7, 1, 0.0, 1.5, 31.5, '{"a": 1}', None)


def test_one_statement_serves_durations_and_another_times() -> None:
    """The database adds a duration to its own clock; a time passes as it is."""
    assert operations.send("q", 1).statement is queues.SEND
    assert operations.send("q", 1).parameters == {"queue": "q", "body": "1", "headers": None, "delay_ms": 0}
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert operations.send("q", 1, delay=at).statement is client.SEND_AT
    assert operations.send_batch("q", [1], delay=at).statement is client.SEND_BATCH_AT
    assert operations.set_vt("q", 1, at).statement is client.SET_VT_AT
    assert operations.set_vt_batch("q", [1], "5s").parameters == {"queue": "q", "msg_ids": [1], "delay_ms": 5000}


def test_only_what_changes_nothing_is_a_read() -> None:
    """Taking messages hides them: that is a write."""
    looks = [operations.metrics("q"), operations.metrics_all(), operations.list_queues()]
    assert {request.moment for request in looks} == {Moment.READ}
    writes: list[operations.Request[Any]] = [
        operations.read("q"),
        operations.pop("q"),
        operations.send("q", 1),
        operations.create("q"),
        operations.drop("q"),
        operations.purge_step("q"),
        operations.set_vt("q", 1, 1),
        operations.delete("q", 1),
        operations.archive_batch("q", [1]),
    ]
    assert {request.moment for request in writes} == {Moment.WRITE}


def test_rows_become_messages() -> None:
    """Times are in UTC, bodies are read when they are looked at."""
    (message,) = operations.read("q").answer([ROW])
    assert message.enqueued_at == datetime(1970, 1, 1, tzinfo=UTC)
    assert message.last_read_at == datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    assert message.vt - message.enqueued_at == timedelta(seconds=31.5)
    assert (message.body, message.raw, message.headers) == ({"a": 1}, '{"a": 1}', None)
    assert operations.set_vt("q", 1, 1).answer([]) is None


@pytest.mark.parametrize(("seconds", "year"), [(float("inf"), 9999), (1e18, 9999), (float("-inf"), 1)])
def test_times_beyond_python_become_its_ends(seconds: float, year: int) -> None:
    """A row parked at 'infinity' is a row like any other."""
    (message,) = operations.pop("q").answer([(1, 0, 0.0, None, seconds, "1", None)])
    assert (message.vt.year, message.vt.tzinfo) == (year, UTC)


@pytest.mark.parametrize(
    ("request_", "rows"),
    [
        (operations.read("q"), [(1, 2)]),
        (operations.send("q", 1), []),
        (operations.metrics("q"), [('{"queue_name": "q"}',)]),
        (operations.metrics("q"), []),
        (operations.metrics("q"), [("nonsense",)]),
        (operations.list_queues(), [("q",)]),
        (operations.pop("q"), [(1, 0, "x", None, 0.0, "1", None)]),
    ],
)
def test_an_unexpected_answer_is_a_protocol_error(request_: operations.Request[Any], rows: Any) -> None:
    """Never an exception of Python's own, never a guess."""
    with pytest.raises(ProtocolError, match="not understood") as caught:
        request_.answer(rows)
    assert caught.value.operation == request_.operation


def test_fields_that_newer_versions_add_do_no_harm() -> None:
    """Metrics are read by name."""
    text = (
        '{"queue_name": "q", "queue_length": 3, "newest_msg_age_sec": null, "oldest_msg_age_sec": 5, '
        '"total_messages": 9, "scrape_time": "2026-01-02T03:04:05.678901+00:00", "queue_visible_length": 2, "new": 1}'
    )
    found = operations.metrics("q").answer([(text,)])
    assert (found.length, found.visible_length, found.total_messages) == (3, 2, 9)
    assert (found.newest_age_s, found.oldest_age_s, found.default_partition_length) == (None, 5, None)
    assert found.scraped_at.tzinfo is not None


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in bytes."""
    monkeypatch.setattr(operations, "MAX_BATCH", 2)
    monkeypatch.setattr(operations, "MAX_BODY_BYTES", 10)
    operations.send_batch("q", [1, 2])
    with pytest.raises(ValidationError, match="1 to 2"):
        operations.send_batch("q", [1, 2, 3])
    with pytest.raises(ValidationError, match="larger"):
        operations.send_batch("q", ["aaaa", "bbbb"])


@pytest.mark.parametrize("interval", [0, -5, True, 1.5, None, "", "  "])
def test_intervals_of_partitions_are_numbers_or_text(interval: Any) -> None:
    """What a time means is PostgreSQL's to judge."""
    with pytest.raises(ValidationError):
        operations.create_partitioned("q", partition_interval=interval)
    request = operations.create_partitioned("q", partition_interval="1 day", retention_interval=5)
    assert request.parameters == {"queue": "q", "partition_interval": "1 day", "retention_interval": "5"}


def test_a_lock_timeout_of_nothing_is_still_a_limit() -> None:
    """Zero would mean none to PostgreSQL."""
    assert operations.drop("q", lock_timeout=0).parameters == {"queue": "q", "lock_timeout_ms": "1"}

"""Messages that the database itself cannot handle like others: each ends somewhere, and none goes round for ever."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from tests.support.running import runs, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch

TASKS = """
    import os, signal
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt}\\n")
        if message.raw == b'"dies"':
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_body_that_has_no_text_is_a_dead_letter_at_once(tmp_path: Path, database: str) -> None:
    """Small in the table and gigabytes as text: no handler can see it, and the original is kept."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    on_success = "archive"
    """
    with stage(tmp_path, database, config, TASKS) as on:
        on.create()
        on.connection.execute(
            "INSERT INTO pgmq.q_jobs (vt, message)"
            " SELECT clock_timestamp(), jsonb_agg(1e131071) FROM generate_series(1, 9000)"
        )
        on.send(*range(20))
        on.service.start()
        on.until_empty(timeout_s=90)
        assert on.service.stop() == 0
        assert len(on.archived()) == len(runs(tmp_path)) == 20
        [letter] = on.rows(
            "SELECT message->>'reason', message->'error'->>'type', jsonb_array_length(message->'message'),"
            " message->'source'->>'msg_id' FROM pgmq.q_jobs_dlq"
        )
        assert letter == ("invalid_message", letter[1], 9000, "1")


def test_headers_that_cannot_be_written_again_do_not_go_round_for_ever(tmp_path: Path, database: str) -> None:
    """Nested deeper than our sessions can write: attempts count all the same, and then it is left alone, loudly."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "5m"
    retry = { base = "100ms" }
    max_attempts = 2
    max_deaths = 2
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, TASKS) as on:
        on.create()
        with psycopg.connect(database, autocommit=True) as sender:
            sender.execute("SET max_stack_depth = '4MB'")
            deep = "[" * 25_000 + "]" * 25_000
            sender.execute("SELECT pgmq.send('jobs', '\"dies\"'::jsonb, %s::jsonb)", ['{"deep": ' + deep + "}"])
        on.service.start()
        watch = Watch(on.service)
        eventually(
            lambda: watch.metric("messages_retried_total", reason="unmovable") == 1, timeout_s=60, what="its end"
        )
        assert runs(tmp_path) == [(1, 1), (1, 2)]
        [(read_ct, left_s)] = on.rows(
            "SELECT read_ct, extract(epoch FROM vt - clock_timestamp())::float8 FROM pgmq.q_jobs"
        )
        assert read_ct == 2
        assert 500 < left_s <= 600
        lapsed = [event for event in on.events("settlement.lapsed") if "cannot be moved" in json.dumps(event)]
        assert len(lapsed) == 1
        on.send("fine")
        eventually(lambda: len(on.archived()) == 1, what="another message")
        assert on.service.stop() == 0
        assert on.letters() == []


SHOWING = """
    import json
    def handle(message, tx=None):
        with open("seen", "a") as file:
            left_s = message.time_left()
            what = [message.id, message.attempt, message.deliveries, message.headers, message.enqueued_at.isoformat()]
            file.write(json.dumps([*what, None if left_s is None else 50 < left_s <= 60, message.body]) + "\\n")
"""
UNKNOWN = "1970-01-01T00:00:00+00:00"  # infinities are no moment


@pytest.mark.parametrize("mode", ["regular", "transactional"])
def test_rows_that_hold_strange_numbers_are_messages_like_others(tmp_path: Path, database: str, mode: str) -> None:
    """Whoever may write the table may write anything: what a column can hold is shown to the handler, in its place."""
    config = f"""
    [queues.jobs]
    handler = "tasks:handle"
    mode = "{mode}"
    hard_timeout = "60s"
    on_success = "archive"
    """
    with stage(tmp_path, database, config, SHOWING) as on:
        on.create()
        on.connection.execute(
            "INSERT INTO pgmq.q_jobs (msg_id, read_ct, enqueued_at, vt, message, headers)"
            " OVERRIDING SYSTEM VALUE VALUES"
            " (-9223372036854775808, -2147483648, '-infinity', '-infinity', '1', '{\"a\": [1]}'),"
            " (9223372036854775807, -1, 'infinity', now(), '2', '[1]'),"
            " (0, 0, '2026-01-02 03:04:05.678901+00', now(), '3', null),"
            " (-7, -5, '1969-12-31 23:59:59.5+00', now(), '4', '{}')"
        )
        on.service.start()
        on.until_empty(timeout_s=60)
        assert on.service.stop() == 0
        lowest = -(2**31) + 1
        assert sorted(json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()) == [
            [-(2**63), 1, lowest, {"a": [1]}, UNKNOWN, True, 1],
            [-7, 1, -4, {}, "1969-12-31T23:59:59.500000+00:00", True, 4],
            [0, 1, 1, {}, "2026-01-02T03:04:05.678901+00:00", True, 3],
            [2**63 - 1, 1, 0, {}, UNKNOWN, True, 2],
        ]
        assert on.rows("SELECT count(*)::int FROM pgmq.a_jobs") == [(4,)]
        assert not on.events("child.ended")

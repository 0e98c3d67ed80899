"""The supervisor as a process, in regular mode, on a real queue: what issue and failure model promise of the whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.support.service import Service
from tests.support.waiting import eventually


@contextmanager
def running(folder: Path, dsn: str, config: str, tasks: str) -> Iterator[tuple[Service, psycopg.Connection[Any]]]:
    """A service and a connection; whatever happens, no process of it stays."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        service = Service(folder, dsn, config, tasks=tasks)
        try:
            yield service, connection
        finally:
            service.close()


def left(connection: psycopg.Connection[Any], queue: str = "jobs") -> int:
    """How many messages are in the queue, in flight and delayed ones too."""
    row = connection.execute(f"SELECT count(*) FROM pgmq.q_{queue}").fetchone()  # type: ignore[call-overload]
    return int(row[0])


COUNTING = """
[queues.jobs]
handler = "tasks:handle"
concurrency = 4
on_success = "archive"
retry = { base = "50ms", max = "200ms" }
"""


def test_twenty_thousand_messages_with_failures_and_a_restart_are_all_accounted_for(
    tmp_path: Path, database: str
) -> None:
    """1 % fail at each attempt; the supervisor is stopped and started in the middle: nothing is lost or left."""
    tasks = """
    def handle(message):
        if message.body % 100 == 7:
            raise ValueError("one in a hundred")
    """
    with running(tmp_path, database, COUNTING, tasks) as (service, connection):
        connection.execute("SELECT pgmq.create('jobs')")
        connection.execute(
            "INSERT INTO pgmq.q_jobs (vt, message) "
            "SELECT clock_timestamp(), to_jsonb(n) FROM generate_series(1, 20000) n"
        )
        service.start()
        eventually(lambda: left(connection) < 12_000, timeout_s=60, what="half of the work")
        assert service.stop() == 0
        assert left(connection) > 0, "nothing was left for the second run"
        service.start()
        eventually(lambda: left(connection) == 0, timeout_s=120, what="the rest of the work")
        assert service.stop() == 0
        archived = connection.execute("SELECT count(*), count(DISTINCT msg_id) FROM pgmq.a_jobs").fetchone()
        dead = connection.execute(
            "SELECT count(*), count(DISTINCT message->'message'), min((message->'source'->>'attempt')::int), "
            "max((message->'source'->>'attempt')::int), bool_and(message->>'reason' = 'attempts_exhausted') "
            "FROM pgmq.q_jobs_dlq"
        ).fetchone()
        assert archived == (19_800, 19_800)
        assert dead == (200, 200, 5, 5, True)


def test_a_task_much_longer_than_its_visibility_timeout_runs_once(tmp_path: Path, database: str) -> None:
    """The parent renews the lease for as long as the handler runs: one delivery, one run."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "1s"
    concurrency = 2
    on_success = "archive"
    """
    tasks = """
    import time
    def handle(message):
        print("begins", message.attempt, flush=True)
        time.sleep(6)
    """
    with running(tmp_path, database, config, tasks) as (service, connection):
        connection.execute("SELECT pgmq.create('jobs')")
        connection.execute("SELECT pgmq.send('jobs', '1')")
        service.start()
        eventually(lambda: left(connection) == 0, timeout_s=60, what="the long task")
        assert service.stop() == 0
        assert connection.execute("SELECT read_ct FROM pgmq.a_jobs").fetchall() == [(1,)]
        assert service.log.count("begins") == 1


def test_a_delayed_message_starts_when_its_delay_is_over_whatever_the_poll(tmp_path: Path, database: str) -> None:
    """Nothing notifies when a delay runs out: the next visible time does it, not the poll of 60 s."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    polling_interval = "60s"
    """
    tasks = """
    import time
    def handle(message):
        print("started after", time.time() - message.body, flush=True)
    """
    with running(tmp_path, database, config, tasks) as (service, connection):
        connection.execute("SELECT pgmq.create('jobs')")
        service.start()
        service.wait_for_log("child.ready")
        connection.execute("SELECT pgmq.send('jobs', to_jsonb(%s::float8), 3)", (time.time(),))
        service.wait_for_log("started after", timeout_s=20)
        after = float(service.log.partition("started after ")[2].split('"')[0].split()[0])
        assert 2.9 <= after <= 4.0
        assert service.stop() == 0


def test_cpu_bound_handlers_in_every_child_lose_no_lease(tmp_path: Path, database: str) -> None:
    """More spinning children than cores: the parent still renews in time, each message is delivered once."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "2s"
    concurrency = 6
    on_success = "archive"
    """
    tasks = """
    import time
    def handle(message):
        until = time.monotonic() + 5
        while time.monotonic() < until:
            pass
    """
    with running(tmp_path, database, config, tasks) as (service, connection):
        connection.execute("SELECT pgmq.create('jobs')")
        connection.execute("SELECT pgmq.send_batch('jobs', ARRAY['1','2','3','4','5','6']::jsonb[])")
        service.start()
        eventually(lambda: left(connection) == 0, timeout_s=60, what="six spinning tasks")
        assert service.stop() == 0
        assert connection.execute("SELECT max(read_ct), count(*) FROM pgmq.a_jobs").fetchall() == [(1, 6)]
        assert "lease.lost" not in service.log


def test_what_was_claimed_and_not_started_is_back_at_once_after_term(tmp_path: Path, database: str) -> None:
    """TERM with messages held ahead: each is visible again at once, its attempts unchanged; the running one ends."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 1
    visibility_timeout = "60s"
    """
    tasks = """
    import time
    def handle(message):
        if message.body == "slow":
            print("slow begins", flush=True)
            time.sleep(2)
    """
    with running(tmp_path, database, config, tasks) as (service, connection):
        connection.execute("SELECT pgmq.create('jobs')")
        connection.execute(
            "INSERT INTO pgmq.q_jobs (vt, message) SELECT clock_timestamp(), "
            "CASE WHEN n = 300 THEN '\"slow\"'::jsonb ELSE to_jsonb(n) END FROM generate_series(1, 500) n"
        )
        service.start()
        service.wait_for_log("slow begins")
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
        rows = connection.execute(
            "SELECT count(*) FILTER (WHERE vt <= now()), count(*), "
            "count(*) FILTER (WHERE read_ct - coalesce((headers->'x-supervisor'->>'refunds')::int, 0) <> 0) "
            "FROM pgmq.q_jobs"
        ).fetchone()
        assert rows is not None
        visible, all_left, charged = rows
        assert (all_left, charged) == (visible, 0)
        assert all_left == 200, "the running message was finished, and none beyond it was lost or run"

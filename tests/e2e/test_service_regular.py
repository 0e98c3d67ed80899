"""The supervisor as a process, in regular mode, on a real queue: what the failure model promises of the whole."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.running import stage
from tests.support.waiting import eventually

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
    """1 % fail at each attempt; the supervisor is stopped and started on the way: nothing is lost or left."""
    tasks = """
    def handle(message):
        if message.body % 100 == 7:
            raise ValueError("one in a hundred")
    """
    with stage(tmp_path, database, COUNTING, tasks) as on:
        on.create()
        on.connection.execute(
            "INSERT INTO pgmq.q_jobs (vt, message) "
            "SELECT clock_timestamp(), to_jsonb(n) FROM generate_series(1, 20000) n"
        )
        on.service.start()
        eventually(lambda: on.left() < 16_000, timeout_s=60, what="some of the work")
        assert on.service.stop() == 0
        assert on.left() > 0, "nothing was left for the second run"
        on.service.start()
        eventually(lambda: on.left() == 0, timeout_s=120, what="the rest of the work")
        assert on.service.stop() == 0
        archived = on.connection.execute("SELECT count(*), count(DISTINCT msg_id) FROM pgmq.a_jobs").fetchone()
        dead = on.connection.execute(
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
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.connection.execute("SELECT pgmq.send('jobs', '1')")
        on.service.start()
        eventually(lambda: on.left() == 0, timeout_s=60, what="the long task")
        assert on.service.stop() == 0
        assert on.connection.execute("SELECT read_ct FROM pgmq.a_jobs").fetchall() == [(1,)]
        assert on.service.log.count("begins") == 1


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
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.service.start()
        on.service.wait_for_log("child.ready")
        on.connection.execute("SELECT pgmq.send('jobs', to_jsonb(%s::float8), 3)", (time.time(),))
        on.service.wait_for_log("started after", timeout_s=20)
        after = float(on.service.log.partition("started after ")[2].split('"')[0].split()[0])
        assert 2.9 <= after <= 10.0, "the poll comes after 60 s"
        assert on.service.stop() == 0


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
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.connection.execute("SELECT pgmq.send_batch('jobs', ARRAY['1','2','3','4','5','6']::jsonb[])")
        on.service.start()
        eventually(lambda: on.left() == 0, timeout_s=60, what="six spinning tasks")
        assert on.service.stop() == 0
        assert on.connection.execute("SELECT max(read_ct), count(*) FROM pgmq.a_jobs").fetchall() == [(1, 6)]
        assert "lease.lost" not in on.service.log


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
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.connection.execute(
            "INSERT INTO pgmq.q_jobs (vt, message) SELECT clock_timestamp(), "
            "CASE WHEN n = 300 THEN '\"slow\"'::jsonb ELSE to_jsonb(n) END FROM generate_series(1, 500) n"
        )
        on.service.start()
        on.service.wait_for_log("slow begins")
        on.service.signal(signal.SIGTERM)
        assert on.service.wait() == 0
        rows = on.connection.execute(
            "SELECT count(*) FILTER (WHERE vt <= now()), count(*), "
            "count(*) FILTER (WHERE read_ct - coalesce((headers->'x-supervisor'->>'refunds')::int, 0) <> 0) "
            "FROM pgmq.q_jobs"
        ).fetchone()
        assert rows is not None
        visible, all_left, charged = rows
        assert (all_left, charged) == (visible, 0)
        assert all_left == 200, "the running message was finished, and none beyond it was lost or run"

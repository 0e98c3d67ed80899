"""Notifications of a whole supervisor: each loss is repaired or made up for by another way to find a message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.running import stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

RECORDING = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.queue} {message.body} {time.time()}\\n")
"""
TRIGGER = "trigger_notify_queue_insert_listeners"


def started(folder: Path) -> dict[str, float]:
    """When handlers began, by body."""
    try:
        lines = (folder / "ran").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {body: float(at) for _, body, at in map(str.split, lines)}


def test_a_second_message_right_behind_the_first_does_not_wait_for_the_poll(tmp_path: Path, database: str) -> None:
    """PGMQ's throttle swallows its notification: the queue is read once more when the throttle has passed."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    polling_interval = "10m"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        for number in range(0, 10, 2):
            on.send(number)
            eventually(lambda n=number: str(n) in started(tmp_path), timeout_s=5, what="the first")
            sent_at = time.time()
            on.send(number + 1)
            eventually(lambda n=number: str(n + 1) in started(tmp_path), timeout_s=5, what="the second")
            assert started(tmp_path)[str(number + 1)] - sent_at < 2.0
        assert watch.metric("wakeups_total", source="poll") == 0
        assert on.service.stop() == 0


@pytest.mark.timeout(180)
def test_what_is_lost_at_run_time_is_repaired_by_the_timer(tmp_path: Path, database: str) -> None:
    """A trigger dropped, a trigger disabled, a throttle row gone: each is told, counted, and heard of again."""
    config = (
        HTTP
        + """
    [queues.one]
    handler = "tasks:handle"
    polling_interval = "10m"
    [queues.two]
    handler = "tasks:handle"
    polling_interval = "10m"
    [queues.three]
    handler = "tasks:handle"
    polling_interval = "10m"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create("one", "two", "three")
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        on.send(1, queue="one")
        on.send(2, queue="two")
        on.send(3, queue="three")
        eventually(lambda: len(started(tmp_path)) == 3, timeout_s=10, what="notified queues")
        assert watch.metric("notify_repairs_total") == 0
        on.connection.execute(f"DROP TRIGGER {TRIGGER} ON pgmq.q_one".encode())
        on.connection.execute(f"ALTER TABLE pgmq.q_two DISABLE TRIGGER {TRIGGER}".encode())
        on.connection.execute("DELETE FROM pgmq.notify_insert_throttle WHERE queue_name = 'three'")
        eventually(lambda: watch.metric("notify_repairs_total") == 3, timeout_s=60, what="three repairs")
        assert {event["queue"]: event["what"] for event in on.events("notify.repaired")} == {
            "one": "trigger",
            "two": "trigger",
            "three": "throttle",
        }
        on.send(4, queue="one")
        on.send(5, queue="two")
        on.send(6, queue="three")
        eventually(lambda: len(started(tmp_path)) == 6, timeout_s=10, what="notified queues")
        assert watch.metric("wakeups_total", source="poll") == 0
        assert on.service.stop() == 0


def test_notifications_that_nobody_may_set_up_are_missed_loudly_and_polling_goes_on(
    tmp_path: Path, database: str
) -> None:
    """A role that owns nothing: one line and a metric a queue, and the messages are found all the same."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    polling_interval = "1s"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create("jobs", "jobs_dlq")
        role = f"worker_{on.connection.info.dbname}"
        on.connection.execute(
            f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA pgmq TO {role};"
            f" GRANT SELECT ON pgmq.meta TO {role};"
            f" GRANT SELECT, INSERT, UPDATE, DELETE ON pgmq.q_jobs, pgmq.q_jobs_dlq TO {role}".encode()
        )
        try:
            on.service.dsn = f"{database} user={role}".replace("user=postgres ", "")
            on.service.start()
            watch = Watch(on.service)
            watch.until_ready()
            on.send(1, 2, 3)
            on.until_empty(timeout_s=20)
            eventually(
                lambda: watch.metric("notify_setup_failures_total", queue="jobs") >= 1, timeout_s=60, what="the metric"
            )
            pass_time(3)
            [event] = on.events("notify.setup_failed")
            assert event["level"] == "warning"
            assert on.service.stop() == 0
        finally:
            on.service.close()
            on.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())

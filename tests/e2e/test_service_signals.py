"""Signals, deploys and parked queues, seen from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.running import stage
from tests.support.waiting import eventually

ONE = """
[shutdown]
grace = "{grace}"
kill_after = "{kill_after}"
[queues.jobs]
handler = "tasks:handle"
visibility_timeout = "30s"
max_attempts = 3
on_success = "archive"
"""


def test_a_handler_that_ignores_everything_is_killed_after_the_grace_period(tmp_path: Path, database: str) -> None:
    """Gone within grace + kill_after, exit code 3, and the message is back at once, uncharged."""
    tasks = """
    import signal, time
    def handle(message):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("begins", flush=True)
        time.sleep(3600)
    """
    with stage(tmp_path, database, ONE.format(grace="1s", kill_after="2s"), tasks) as on:
        on.create()
        on.send(1)
        on.service.start()
        on.service.wait_for_log("begins")
        asked = time.monotonic()
        assert on.service.stop() == 3
        assert 1.0 <= time.monotonic() - asked <= 4.5
        [(visible, read_ct, refunds)] = on.rows(
            "SELECT vt <= clock_timestamp(), read_ct, (headers->'x-supervisor'->>'refunds')::int FROM pgmq.q_jobs"
        )
        assert (visible, read_ct - refunds) == (True, 0)


def test_two_signals_at_once_are_one_and_a_later_one_kills_now(tmp_path: Path, database: str) -> None:
    """INT twice within 50 ms drains; another more than a second later ends it at once with 3."""
    tasks = """
    import time
    def handle(message):
        print("begins", flush=True)
        time.sleep(3600)
    """
    with stage(tmp_path, database, ONE.format(grace="60s", kill_after="2s"), tasks) as on:
        on.create()
        on.send(1)
        on.service.start()
        on.service.wait_for_log("begins")
        on.service.signal(signal.SIGINT)
        on.service.signal(signal.SIGINT)
        on.service.wait_for_log("shutdown.started")
        first = time.monotonic()
        eventually(lambda: time.monotonic() - first > 1.2, what="more than a second")
        assert on.service.process.poll() is None
        on.service.signal(signal.SIGINT)
        assert on.service.wait(5) == 3


def test_signals_to_the_whole_group_let_running_messages_finish(tmp_path: Path, database: str) -> None:
    """TERM, INT and HUP to parent and children alike (systemd, Ctrl-C): the handler goes on to its end."""
    tasks = """
    import os, time
    def handle(message):
        print("pid", os.getpid(), flush=True)
        time.sleep(2)
    """
    with stage(tmp_path, database, ONE.format(grace="30s", kill_after="2s"), tasks) as on:
        on.create()
        on.send(1)
        on.service.start()
        on.service.wait_for_log("pid ")
        child = int(on.events("child.output")[0]["line"].split()[1])
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.killpg(child, signum)
        on.service.signal(signal.SIGTERM)
        assert on.service.wait() == 0
        assert on.archived() == [(1, 1)]


def test_rolling_restarts_charge_nothing_to_a_long_task(tmp_path: Path, database: str) -> None:
    """Six restarts with max_attempts = 3, each killing the task after its grace: it is never dead-lettered."""
    tasks = """
    import time
    def handle(message):
        print("attempt", message.attempt, flush=True)
        if message.deliveries < 7:
            time.sleep(3600)
    """
    with stage(tmp_path, database, ONE.format(grace="250ms", kill_after="2s"), tasks) as on:
        on.create()
        on.send(1)
        for restart in range(1, 7):
            on.service.start()
            eventually(lambda n=restart: on.service.log.count("attempt ") == n, timeout_s=60, what="the task")
            assert on.service.stop() == 3
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert on.letters() == []
        assert {event["line"] for event in on.events("child.output")} == {"attempt 1"}


def test_a_reload_under_load_brings_new_code_without_a_duplicate(tmp_path: Path, database: str) -> None:
    """HUP while messages flow: later ones run the new code, each runs once, and a broken reload changes nothing."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 3
    on_success = "archive"
    """
    tasks = """
    import os, time
    VERSION = "one"
    def handle(message):
        time.sleep(0.01)
        with open("ran", "a") as file:
            file.write(f"{message.id} {VERSION}\\n")
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(*range(1500))
        on.service.start()
        eventually(lambda: on.left() < 1300, timeout_s=60, what="some work")
        module = tmp_path / "tasks.py"
        module.write_text(module.read_text().replace('"one"', '"two"'))
        on.service.signal(signal.SIGHUP)
        on.service.wait_for_log("reload.ended")
        at_reload = on.left()
        assert at_reload > 0
        module.write_text("raise RuntimeError('a bad deploy')\n")
        on.service.signal(signal.SIGHUP)
        on.service.wait_for_log("a bad deploy")
        on.until_empty()
        assert on.service.stop() == 0
        ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
        assert len(ran) == len({msg_id for msg_id, _ in ran}) == 1500
        assert {version for _, version in ran} == {"one", "two"}
        assert ran[-1][1] == "two"


def test_a_queue_whose_module_cannot_be_imported_is_parked_and_the_others_go_on(tmp_path: Path, database: str) -> None:
    """One clear line; its messages stay; the good queue works."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    [queues.broken]
    handler = "broken:handle"
    """
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such licence')\n")
    with stage(tmp_path, database, config, "def handle(message): pass\n") as on:
        on.create("jobs", "broken")
        on.send(1, 2, 3)
        on.send(1, queue="broken")
        on.service.start()
        on.until_empty()
        on.service.wait_for_log("queue.parked")
        assert on.left("broken") == 1
        assert on.rows("SELECT read_ct FROM pgmq.q_broken") == [(0,)]
        assert on.service.stop() == 0


def test_with_every_queue_parked_the_supervisor_ends_with_1(tmp_path: Path, database: str) -> None:
    """Better an exit code that says so than a process that does nothing."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    """
    with stage(tmp_path, database, config, "raise RuntimeError('no such licence')\n") as on:
        on.create()
        on.service.start()
        assert on.service.wait(60) == 1
        assert "no such licence" in on.service.log

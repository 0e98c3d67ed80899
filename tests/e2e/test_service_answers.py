"""Statements that PostgreSQL carried out and whose answers were lost: each is said again, and counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.proxy import Proxy
from tests.support.running import runs, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch

CONFIG = (
    HTTP
    + """
[queues.jobs]
handler = "tasks:handle"
visibility_timeout = "6s"
polling_interval = "1s"
on_success = "archive"
retry = { base = "100ms" }
max_deaths = 3
"""
)
TASKS = """
    import os, signal, time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt}\\n")
        if message.body == "dies" and message.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if message.body == "rejects":
            raise message.dead_letter("no good")
        if message.body == "long":
            time.sleep(5)
"""


def test_a_success_whose_answer_was_lost_is_made_once(tmp_path: Path, database: str, proxy: Proxy) -> None:
    """Archived, never run again; not told as a success, since nobody knows that it was ours."""
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.service.dsn = proxy.dsn
        on.create()
        trap = proxy.swallow_reply('insert into "pgmq"."a_jobs"')
        on.send("fine")
        on.service.start()
        trap.wait()
        on.service.wait_for_log("settlement.lapsed")
        watch = Watch(on.service)
        assert watch.metric("messages_succeeded_total") == 0
        on.send("fine")
        eventually(lambda: watch.metric("messages_succeeded_total") == 1, timeout_s=20, what="the next one")
        assert on.service.stop() == 0
        assert runs(tmp_path) == [(1, 1), (2, 1)]
        assert on.archived() == [("fine", 1), ("fine", 1)]


def test_a_dead_letter_whose_answer_was_lost_is_moved_once(tmp_path: Path, database: str, proxy: Proxy) -> None:
    """Source gone and one letter there, or neither."""
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.service.dsn = proxy.dsn
        on.create()
        trap = proxy.swallow_reply("pgmq.send(")
        on.send("rejects")
        on.service.start()
        trap.wait()
        on.service.wait_for_log("settlement.lapsed")
        on.until_empty()
        assert on.service.stop() == 0
        assert len(on.letters()) == 1


def test_a_death_whose_charge_was_said_twice_counts_once(tmp_path: Path, database: str, proxy: Proxy) -> None:
    """Absolute values, and the fence ends with the first: the repetition matches nothing."""
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.service.dsn = proxy.dsn
        on.create()
        trap = proxy.swallow_reply("as s(delay_ms, accounts, n)")
        on.send("dies")
        on.service.start()
        trap.wait()
        on.until_empty(timeout_s=30)
        assert on.service.stop() == 0
        assert runs(tmp_path) == [(1, 1), (1, 2)]
        assert on.rows("SELECT read_ct, headers->'x-supervisor'->'deaths' FROM pgmq.a_jobs") == [(2, 1)]


def test_a_claim_whose_answer_was_lost_comes_back_after_its_lease(tmp_path: Path, database: str, proxy: Proxy) -> None:
    """Nobody knows what it took; nothing runs before the lease is over, then it runs once."""
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.send("fine")
        trap = proxy.swallow_reply("due as materialized")
        on.service.start()
        trap.wait()
        on.until_empty(timeout_s=30)
        assert on.service.stop() == 0
        assert on.archived() == [("fine", 2)]
        assert len(runs(tmp_path)) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_renewal_whose_answer_was_lost_is_said_again(tmp_path: Path, database: str, proxy: Proxy, times: int) -> None:
    """A failed renewal is no lost lease: one run, one delivery."""
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.service.dsn = proxy.dsn
        on.create()
        trap = proxy.swallow_reply("as lease_s", times=times)
        on.send("long")
        on.service.start()
        trap.wait()
        on.until_empty(timeout_s=30)
        assert on.service.stop() == 0
        assert on.archived() == [("long", 1)]
        assert runs(tmp_path) == [(1, 1)]
        assert on.events("lease.lost") == []

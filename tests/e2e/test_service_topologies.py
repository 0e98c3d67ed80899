"""Standbys, poolers, and many supervisors at once."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.pooler import transaction_pooler
from tests.support.replication import Pair, replicated_servers
from tests.support.running import stage
from tests.support.service import Service
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

CONFIG = (
    HTTP
    + """
[queues.jobs]
handler = "tasks:handle"
concurrency = 2
visibility_timeout = "15s"
on_success = "archive"
"""
)
RECORDING = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt} {time.time()}\\n")
        time.sleep(message.body)
"""


def runs(folder: Path) -> list[tuple[int, int, float]]:
    """What handlers wrote down at their start: (message, attempt, when)."""
    try:
        lines = (folder / "ran").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(msg_id), int(attempt), float(at)) for msg_id, attempt, at in map(str.split, lines)]


# --- standbys ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give a primary and its standby."""
    with replicated_servers() as made:
        yield made


@pytest.mark.timeout(240)
def test_a_hot_standby_is_refused_politely_and_taken_up_after_its_promotion(tmp_path: Path, pair: Pair) -> None:
    """It stays up, is not ready, says so once, stops with 0 when told to; and begins by itself when it can write."""
    with stage(tmp_path, pair.primary.dsn(), CONFIG, RECORDING) as on:
        on.create()
        on.send(0, 0)
        pair.until_caught_up()
        on.service.dsn = pair.standby.dsn()
        on.service.start()
        on.service.wait_for_log("hot standby")
        assert on.service.stop() == 0
        on.service.start()
        watch = Watch(on.service, start=2)
        pass_time(5)
        assert watch.get("/readyz")[0] == 503
        assert "standby" in watch.get("/readyz")[1]
        assert watch.is_live
        assert on.service.log.count("hot standby") == 2, "once for each of the two starts"
        assert '"level":"error"' not in on.service.log
        assert on.events("notify.setup_failed") == on.events("listener.lost") == []
        on.connection.close()
        pair.primary.stop("immediate")
        pair.promote()
        with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
            on.connection = connection
            watch.until_ready()
            on.until_empty()
            on.send(0)
            on.until_empty(timeout_s=10)
            assert on.service.stop() == 0
            assert [read_ct for _, read_ct in on.archived()] == [1, 1, 1]
            assert on.service.log.count("hot standby") == 2


@pytest.mark.timeout(240)
def test_a_failover_under_load_loses_nothing(tmp_path: Path) -> None:
    """Several hosts in the DSN: the supervisor finds the new primary, and settles there what it had in its hands."""
    with replicated_servers(synchronous=True) as pair, stage(tmp_path, pair.primary.dsn(), CONFIG, RECORDING) as on:
        on.create()
        on.send(10, *[0.02] * 300)
        on.service.dsn = pair.dsn
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < 250, timeout_s=60, what="some of the work")
        on.connection.close()
        pair.primary.stop("immediate")
        eventually(lambda: not watch.is_ready, what="/readyz to tell")
        pair.promote()
        with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
            on.connection = connection
            # The old primary's last wish was a standby of its own; nobody follows the new one.
            connection.execute("alter system reset synchronous_standby_names")
            connection.execute("select pg_reload_conf()")
            on.until_empty(timeout_s=90)
            assert on.service.stop() == 0
            assert len(on.archived()) == 301
            ran = [msg_id for msg_id, _, _ in runs(tmp_path)]
            assert len(ran) == len(set(ran)) == 301
            assert on.events("child.ended") == []


# --- poolers ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_behind_a_transaction_pooler_queues_are_polled_and_that_is_said_once(tmp_path: Path, database: str) -> None:
    """LISTEN succeeds there and nothing ever comes: a probe finds out; everything else works."""
    config = CONFIG + 'polling_interval = "1s"\n'
    with transaction_pooler(database) as pooled, stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        on.service.dsn = pooled
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        on.service.wait_for_log("notify.setup_failed")
        [event] = on.events("notify.setup_failed")
        assert event["level"] == "warning"
        assert "pooler" in event["error"]
        assert "listen_dsn" in event["error"]
        assert watch.metric("notify_setup_failures_total", queue="jobs") == 1
        sent_at = time.time()
        on.send(4, *[0] * 200)
        on.until_empty()
        assert min(at for _, _, at in runs(tmp_path)) - sent_at < 3
        assert watch.metric("wakeups_total", source="poll") > 0
        pass_time(8)
        assert len(on.events("notify.setup_failed")) == 1
        assert watch.is_ready
        assert on.service.stop() == 0
        archived = on.archived()
        assert len(archived) == 201
        assert {read_ct for _, read_ct in archived} == {1}


@pytest.mark.timeout(180)
def test_with_a_listening_dsn_beside_the_pooler_notifications_come_through(tmp_path: Path, database: str) -> None:
    """Work goes through the pooler, LISTEN goes to the server."""
    config = f'[database]\nlisten_dsn = "{database}"\n' + CONFIG + 'polling_interval = "10m"\n'
    with transaction_pooler(database) as pooled, stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        on.service.dsn = pooled
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        pass_time(12)  # a probe that failed would be told by now
        for _ in range(3):
            on.send(0)
            on.until_empty(timeout_s=5)
        assert watch.metric("wakeups_total", source="notify") >= 3
        assert on.events("notify.setup_failed") == on.events("listener.lost") == []
        assert on.service.stop() == 0


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_twenty_supervisors_start_at_once_on_an_empty_database(tmp_path: Path, database: str) -> None:
    """One makes the queues, none fails of it, all come up; together they handle every message once."""
    config = (
        CONFIG.replace("concurrency = 2", "concurrency = 1") + '[database]\npool_size = 2\n[log]\nformat = "json"\n'
    )
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(database, autocommit=True))
        services = []
        for number in range(20):
            folder = tmp_path / str(number)
            folder.mkdir()
            service = Service(folder, database, config, tasks=RECORDING)
            stack.callback(service.close)
            services.append(service)
        for service in services:
            service.start()
        watches = []
        for service in services:
            service.wait_for_log('"event":"http"', timeout_s=200)
            watches.append(Watch(service))
        for watch in watches:
            watch.until_ready(timeout_s=200)
        connection.execute("SELECT pgmq.send_batch('jobs', array_agg('0.01'::jsonb)) FROM generate_series(1, 400)")
        eventually(
            lambda: connection.execute("SELECT count(*) FROM pgmq.q_jobs").fetchone() == (0,),
            timeout_s=60,
            what="an empty queue",
        )
        ran = [msg_id for number in range(20) for msg_id, _, _ in runs(tmp_path / str(number))]
        assert len(ran) == len(set(ran)) == 400
        assert connection.execute("SELECT count(*), max(read_ct) FROM pgmq.a_jobs").fetchone() == (400, 1)
        for service in services:
            entries = [json.loads(line) for line in service.log.splitlines() if line.startswith("{")]
            assert [entry for entry in entries if entry["level"] in ("warning", "error")] == []
            service.signal(15)
        assert [service.wait() for service in services] == [0] * 20

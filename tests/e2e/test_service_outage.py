"""The database goes away and comes back while the supervisor works: nothing is lost, nobody is stopped too early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.proxy import Proxy
from tests.support.running import Stage, runs, stage
from tests.support.soak import SOAK
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time, processor_s

RECORDING = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt}\\n")
        time.sleep(message.body)
"""


KINDS = ("refused", "silent")


def go_away(proxy: Proxy, kind: str = "refused") -> None:
    """The server is gone: every session ends and nobody is let in; or nothing is heard of it any more."""
    if kind == "silent":
        proxy.freeze()
        return
    proxy.refuse()
    proxy.cut()


def come_back(proxy: Proxy, kind: str = "refused") -> None:
    """It can be reached again."""
    if kind == "silent":
        proxy.thaw()
    else:
        proxy.accept()


def charged(on: Stage) -> list[tuple[int, int]]:
    """Deliveries and refunds of what was archived, where there was more than one delivery."""
    return [
        (read_ct, refunds)
        for read_ct, refunds in on.rows(
            "SELECT read_ct, coalesce((headers->'x-supervisor'->>'refunds')::int, 0) FROM pgmq.a_jobs"
        )
        if read_ct > 1
    ]


def test_eight_seconds_without_a_database_under_a_lease_of_thirty_change_nothing(
    tmp_path: Path, database: str, proxy: Proxy
) -> None:
    """What runs goes on, what ends meanwhile is settled afterwards: one run each, nothing charged, nothing aborted."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 4
    visibility_timeout = "30s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.send(12, 12, 4, 2, *[0.01] * 40)
        on.service.start()
        eventually(lambda: len(runs(tmp_path)) >= 4, timeout_s=60, what="four running handlers")
        watch = Watch(on.service)
        go_away(proxy)
        pass_time(8)
        finished_unheard = watch.status()["queues"]
        assert finished_unheard
        assert not watch.is_ready
        assert watch.is_live
        proxy.accept()
        on.until_empty()
        watch.until_ready()
        assert on.service.stop() == 0
        assert len(runs(tmp_path)) == 44
        assert {attempt for _, attempt in runs(tmp_path)} == {1}
        assert charged(on) == []
        assert on.events("lease.lost") == on.events("child.ended") == on.events("settlement.lapsed") == []
        assert len(on.events("claiming.failed")) == 1
        assert len(on.events("claiming.recovered")) == 1
        assert on.events("notify.setup_failed") == on.events("notify.repaired") == []


def last_sign_of_life(folder: Path) -> float:
    """When the handler wrote last, on the wall clock that the database of a test shares."""
    return float((folder / "alive").read_text() or 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_longer_than_the_lease_stops_the_handler_before_its_deadline_and_refunds_it(
    tmp_path: Path, database: str, proxy: Proxy, kind: str
) -> None:
    """The child is gone before the database would give the message to anybody else; nobody did, so it is no attempt."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "4s"
    on_success = "archive"
    """
    )
    tasks = """
    import os, time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt}\\n")
        while message.deliveries == 1:
            with open("alive.new", "w") as file:
                file.write(str(time.time()))
            os.rename("alive.new", "alive")
            time.sleep(0.01)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.send(1)
        on.service.start()
        eventually(lambda: runs(tmp_path), timeout_s=60, what="the handler")
        pass_time(5)  # it lives on renewals
        go_away(proxy, kind)
        on.service.wait_for_log('"event":"child.ended"')
        [(vt,)] = on.rows("SELECT extract(epoch FROM vt)::float8 FROM pgmq.q_jobs")
        assert vt - 2.0 < last_sign_of_life(tmp_path) < vt
        [ended] = on.events("child.ended")
        assert ended["cause"] == "lease_lost"
        eventually(lambda: time.time() > vt + 2, what="an outage longer than the lease")
        come_back(proxy, kind)
        on.until_empty()
        assert on.service.stop() == 0
        assert runs(tmp_path) == [(1, 1), (1, 1)]
        assert charged(on) == [(2, 1)]


def test_a_success_that_the_database_could_not_hear_in_time_is_no_attempt(
    tmp_path: Path, database: str, proxy: Proxy
) -> None:
    """The handler ends during an outage longer than the lease: it runs again, and that is the same attempt."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "3s"
    max_attempts = 1
    on_success = "archive"
    """
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.send(1)
        on.service.start()
        eventually(lambda: runs(tmp_path), timeout_s=60, what="the handler")
        go_away(proxy)
        pass_time(6)
        proxy.accept()
        on.until_empty()
        assert on.service.stop() == 0
        assert runs(tmp_path) == [(1, 1), (1, 1)]
        assert charged(on) == [(2, 1)]
        assert on.letters() == []


@pytest.mark.soak
@pytest.mark.timeout(900 if SOAK else 180)
def test_an_outage_in_the_middle_of_many_messages_loses_nothing_and_stops_no_handler(
    tmp_path: Path, database: str, proxy: Proxy
) -> None:
    """2 000 messages and 10 s without a database; with SUPERVISOR_TEST_SOAK 10 000 and 5 minutes."""
    messages, outage_s = (10_000, 300.0) if SOAK else (2_000, 10.0)
    lease_s = 2 * outage_s
    config = (
        HTTP
        + f"""
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 4
    visibility_timeout = "{lease_s}s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.send(*[0.005] * (messages // 2), *[outage_s * 0.8] * 2, *[0.005] * (messages // 2 - 2))
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < messages * 3 // 4, timeout_s=60, what="some of the work")
        go_away(proxy)
        before = len(on.service.log)
        pass_time(outage_s)
        said = on.service.log[before:].count("\n")
        assert watch.is_live
        proxy.accept()
        on.until_empty(timeout_s=300)
        assert on.service.stop() == 0
        archived = on.archived()
        assert len(archived) == messages
        assert on.letters() == []
        ran = runs(tmp_path)
        # What was being acknowledged when the connection ended may have been, unheard: never run again for that. What
        # was being claimed then comes back after its lease, and its first run counts as the second delivery.
        assert len(ran) == len({msg_id for msg_id, _ in ran}) == messages
        assert {attempt for _, attempt in ran} <= {1, 2}
        assert sum(attempt == 2 for _, attempt in ran) <= 100
        assert on.events("child.ended") == on.events("lease.lost") == []
        assert said < 60 + outage_s, "the log was flooded"


@pytest.mark.parametrize("kind", KINDS)
def test_while_the_database_is_down_the_supervisor_idles(
    tmp_path: Path, database: str, proxy: Proxy, kind: str
) -> None:
    """Less than 5 % of a processor with leases to renew, hundreds of results to settle and a queue to read."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 2
    visibility_timeout = "60s"
    max_in_flight = 500
    on_success = "archive"
    [queues.long]
    handler = "tasks:handle"
    concurrency = 2
    visibility_timeout = "20s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        on.create("jobs", "long")
        on.send(60, 60, queue="long")
        on.send(2, *[0.001] * 800)
        on.service.start()
        eventually(lambda: on.left() < 600, timeout_s=60, what="some of the work")
        go_away(proxy, kind)
        pass_time(3)
        before, began, said = processor_s(on.service.pid), time.monotonic(), len(on.service.log)
        pass_time(12)
        share = (processor_s(on.service.pid) - before) / (time.monotonic() - began)
        assert share < 0.05
        assert on.service.log[said:].count("\n") < 100
        come_back(proxy, kind)
        on.until_empty()
        assert len(on.archived()) == 801


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [None, 1, 60], ids=["idle", "finishing", "running"])
def test_a_stop_without_a_database_is_bounded(
    tmp_path: Path, database: str, proxy: Proxy, kind: str, body: float | None
) -> None:
    """TERM ends it within grace and kill_after, and what the database did not hear is left to its lease."""
    config = """
    [shutdown]
    grace = "3s"
    kill_after = "2s"
    [queues.jobs]
    handler = "tasks:handle"
    on_success = "archive"
    """
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.service.start()
        on.service.wait_for_log("child.ready")
        if body is not None:
            on.send(body)
            eventually(lambda: runs(tmp_path), timeout_s=30, what="the handler")
        go_away(proxy, kind)
        began = time.monotonic()
        assert on.service.stop() == (3 if body == 60 else 0)
        assert time.monotonic() - began < 3 + 2 + 3
        assert on.archived() == []
        assert on.left() == (0 if body is None else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_without_a_database_fails_clearly_and_soon(
    tmp_path: Path, database: str, proxy: Proxy, kind: str
) -> None:
    """Exit 1 with one message and its remedy, also where the server takes connections and says nothing."""
    config = """
    [database]
    connect_timeout = "2s"
    [queues.jobs]
    handler = "tasks:handle"
    """
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        go_away(proxy, kind)
        began = time.monotonic()
        on.service.start()
        assert on.service.wait() == 1
        assert time.monotonic() - began < 20
        assert "remedy" in on.service.log
        assert "Traceback" not in on.service.log

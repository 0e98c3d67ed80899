"""The server itself: restarts and crashes, no room left, nothing to be written, no connection to be had."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from supervisor.embedded import EmbeddedServer, install_pgmq
from tests.support.binaries import chosen_binaries
from tests.support.folders import reachable_folder
from tests.support.proxy import Proxy
from tests.support.running import stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

RECORDING = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.queue} {message.id} {message.attempt}\\n")
        time.sleep(message.body)
"""


def runs(folder: Path, queue: str = "jobs") -> list[tuple[int, int]]:
    """What handlers of a queue wrote down at their start: (message, attempt)."""
    try:
        lines = [line.split() for line in (folder / "ran").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [(int(msg_id), int(attempt)) for name, msg_id, attempt in lines if name == queue]


@pytest.fixture
def server(own_server: EmbeddedServer) -> EmbeddedServer:
    """Give a server with PGMQ that may be harmed."""
    with psycopg.connect(own_server.dsn(), autocommit=True) as connection:
        install_pgmq(connection)
    return own_server


def crash(server: EmbeddedServer, how: str) -> None:
    """End the server: in order, as after a crash, or by killing its first process."""
    if how == "kill -9":
        os.kill(server.postmaster_pid, signal.SIGKILL)
    else:
        server.stop("fast" if how == "fast" else "immediate")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["fast", "immediate", "kill -9"])
def test_a_restart_of_the_server_under_load_is_survived(tmp_path: Path, server: EmbeddedServer, how: str) -> None:
    """The durable queue loses nothing; the unlogged one may be empty after a crash; both work on, and are notified."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 2
    visibility_timeout = "10s"
    polling_interval = "10m"
    on_success = "archive"
    [queues.fleeting]
    handler = "tasks:handle"
    storage = "unlogged"
    visibility_timeout = "10s"
    polling_interval = "10m"
    on_success = "archive"
    """
    )
    crashed = how != "fast"
    with stage(tmp_path, server.dsn(), config, RECORDING) as on:
        on.create()
        on.rows("SELECT pgmq.create_unlogged('fleeting')")
        on.send(*[0.01] * 600, 3)
        on.send(*[0.01] * 400, queue="fleeting")
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < 400 and on.left("fleeting") < 350, timeout_s=60, what="some of the work")
        on.connection.close()
        crash(server, how)
        eventually(lambda: not watch.is_ready, what="/readyz to tell")
        pass_time(2)
        server.start()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            on.connection = connection
            on.until_empty(timeout_s=90)
            on.until_empty("fleeting", timeout_s=90)
            watch.until_ready()
            assert len(on.archived()) == 601
            ran = Counter(msg_id for msg_id, _ in runs(tmp_path))
            assert len(ran) == 601
            # Acknowledged and not heard of: never run again. What ran twice had lost its lease to the outage.
            assert set(ran.values()) == {1}
            if not crashed:
                assert len(on.archived("fleeting")) == 400
            eventually(
                lambda: len(on.rows("SELECT FROM pgmq.notify_insert_throttle")) == 2,
                timeout_s=60,
                what="the throttle rows",
            )
            assert watch.metric("notify_repairs_total") == (2 if crashed else 0)
            polls = watch.metric("wakeups_total", source="poll")
            for queue in ("jobs", "fleeting"):
                done = len(runs(tmp_path, queue))
                on.send(0, queue=queue)
                eventually(lambda q=queue, n=done: len(runs(tmp_path, q)) == n + 1, timeout_s=10, what="the new one")
                on.until_empty(queue)
            assert watch.metric("wakeups_total", source="poll") == polls
            assert on.service.stop() == 0
            assert on.letters() == []
            assert on.events("child.ended") == []


def test_a_full_disk_is_met_with_few_statements_and_nothing_is_acknowledged_wrongly(
    tmp_path: Path, database: str, proxy: Proxy
) -> None:
    """Every acknowledgement fails for seconds: tried again with growing pauses, and made when there is room."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 2
    max_in_flight = 500
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.service.dsn = proxy.dsn
        on.create()
        on.connection.execute(
            "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            " RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100'; END$$;"
            " CREATE TRIGGER no_room BEFORE DELETE ON pgmq.q_jobs FOR EACH ROW EXECUTE FUNCTION no_room()"
        )
        on.send(*[0] * 300)
        on.service.start()
        eventually(lambda: len(runs(tmp_path)) == 300, timeout_s=60, what="all handlers")
        before, began = len(proxy.statements("delete from")), time.monotonic()
        pass_time(8)
        said = len(proxy.statements("delete from")) - before
        assert said < 25 * (time.monotonic() - began), "a storm of statements"
        assert on.left() == 300
        assert on.archived() == []
        [event, *_] = on.events("settlement.failed")
        assert "No space left" in event["error"]
        assert len(on.events("settlement.failed")) < 20
        on.connection.execute("DROP TRIGGER no_room ON pgmq.q_jobs")
        on.until_empty()
        assert on.service.stop() == 0
        assert len(on.archived()) == len(runs(tmp_path)) == 300


def test_a_database_that_turns_read_only_is_waited_for(tmp_path: Path, server: EmbeddedServer) -> None:
    """Said once, not ready, nothing stopped; when it can be written again, work goes on as if nothing had been."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 2
    on_success = "archive"
    """
    )
    with stage(tmp_path, server.dsn(), config, RECORDING) as on:
        on.create()
        on.send(9, 2, *[0.01] * 50)
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: len(runs(tmp_path)) >= 2, timeout_s=30, what="running handlers")
        on.connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        on.rows("SELECT pg_reload_conf()")
        eventually(lambda: not watch.is_ready, timeout_s=20, what="/readyz to tell")
        assert "read-only" in watch.get("/readyz")[1]
        pass_time(4)
        assert watch.is_live
        on.connection.execute("SET default_transaction_read_only = off")
        on.connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        on.rows("SELECT pg_reload_conf()")
        on.until_empty()
        watch.until_ready()
        assert on.service.stop() == 0
        assert [read_ct for _, read_ct in on.archived()] == [1] * 52
        assert len(runs(tmp_path)) == 52
        assert on.events("child.ended") == []


@contextlib.contextmanager
def every_connection(dsn: str) -> Iterator[list[psycopg.Connection[tuple[object, ...]]]]:
    """Take all connections that the server has left."""
    with contextlib.ExitStack() as stack:
        taken: list[psycopg.Connection[tuple[object, ...]]] = []
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                taken.append(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
        yield taken


@pytest.fixture
def small_server() -> Iterator[EmbeddedServer]:
    """Give a server that lets only sixteen in."""
    with (
        reachable_folder("small") as folder,
        EmbeddedServer(
            folder,
            base=folder,
            explicit=True,
            settings={"fsync": "off", "max_connections": "16"},
            binaries=chosen_binaries(),
        ) as server,
    ):
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            install_pgmq(connection)
        yield server


def test_a_server_without_a_free_connection_ends_the_start_and_is_waited_for_at_run_time(
    tmp_path: Path, small_server: EmbeddedServer
) -> None:
    """At start: exit 1 and one clear line. Later: sessions that were lost come back when there is room."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "20s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, small_server.dsn(), config, RECORDING) as on:
        on.create()
        with every_connection(small_server.dsn()):
            on.service.start()
            assert on.service.wait(60) == 1
        said = on.service.log
        assert "too many clients" in said
        assert "max_connections" in said
        assert "Traceback" not in said
        on.service.start()
        watch = Watch(on.service)  # the first start did not come so far
        watch.until_ready()
        on.send(8)
        eventually(lambda: runs(tmp_path), timeout_s=30, what="the handler")
        with every_connection(small_server.dsn()):
            ended = on.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgmq-supervisor%'"
            )
            assert ended
            with every_connection(small_server.dsn()):
                eventually(lambda: not watch.is_ready, timeout_s=30, what="/readyz to tell")
                pass_time(6)
                assert watch.is_live
        on.until_empty()
        watch.until_ready()
        assert on.service.stop() == 0
        assert [read_ct for _, read_ct in on.archived()] == [1]
        assert runs(tmp_path) == [(1, 1)]


def test_a_queue_that_is_dropped_and_made_again_is_worked_on_again(tmp_path: Path, database: str) -> None:
    """Said once and not ready while it is gone; then claimed, and notified of, as before."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    polling_interval = "2s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        on.rows("SELECT pgmq.drop_queue('jobs')")
        eventually(lambda: not watch.is_ready, timeout_s=20, what="/readyz to tell")
        assert "does not exist" in watch.get("/readyz")[1]
        pass_time(3)
        assert len(on.events("claiming.failed")) == 1
        on.create()
        on.send(0)
        on.until_empty(timeout_s=20)
        watch.until_ready()
        eventually(
            lambda: on.rows("SELECT FROM pgmq.notify_insert_throttle WHERE queue_name = 'jobs'"),
            timeout_s=60,
            what="its notifications",
        )
        assert on.service.stop() == 0
        assert len(on.archived()) == 1


def test_a_dropped_dead_letter_queue_holds_up_no_acknowledgement(tmp_path: Path, database: str) -> None:
    """What it should take returns after its lease, until the queue is there again; all others are acknowledged."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 2
    visibility_timeout = "2s"
    on_success = "archive"
    """
    )
    tasks = """
    def handle(message):
        if message.body == "bad":
            raise message.dead_letter("no good")
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        on.rows("SELECT pgmq.drop_queue('jobs_dlq')")
        on.send("bad", *range(200))
        eventually(lambda: on.left() == 1, timeout_s=30, what="all others")
        assert len(on.archived()) == 200
        eventually(lambda: on.rows("SELECT read_ct FROM pgmq.q_jobs")[0][0] >= 2, timeout_s=20, what="another delivery")
        assert watch.is_ready
        on.rows("SELECT pgmq.create('jobs_dlq')")
        on.until_empty(timeout_s=20)
        assert on.service.stop() == 0
        [letter] = on.letters()
        assert letter["reason"] == "rejected"

"""Our sessions at the server end at any time, one by one: nothing is lost, nothing is done twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.proxy import Proxy
from tests.support.running import Stage, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

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


def sessions(on: Stage, role: str = "%") -> list[tuple[int, str, str]]:
    """Pid, role and state of our sessions."""
    return [
        (pid, name.removeprefix("pgmq-supervisor "), state)
        for pid, name, state in on.rows(
            "SELECT pid, application_name, coalesce(state, '') FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE %s",
            f"pgmq-supervisor {role}",
        )
    ]


def end(on: Stage, pid: int) -> bool:
    """Terminate a session."""
    return bool(on.rows("SELECT pg_terminate_backend(%s)", pid)[0][0])


@pytest.mark.timeout(300)
def test_two_hundred_ends_of_random_sessions_under_load_lose_nothing(tmp_path: Path, database: str) -> None:
    """Every message is handled once and acknowledged once; what was claimed unheard comes back after its lease."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 4
    visibility_timeout = "20s"
    max_attempts = 20
    on_success = "archive"
    """
    chance = random.Random(5)
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        on.service.start()
        on.service.wait_for_log("child.ready")
        ended: Counter[str] = Counter()
        sent = 0
        while ended.total() < 200:
            sent += len(on.send(*[0.002] * 10))
            pid, role, _ = chance.choice(eventually(lambda: sessions(on), what="a session of ours"))
            ended[role] += end(on, pid)
            pass_time(0.05)
        on.until_empty(timeout_s=90)
        assert on.service.stop() == 0
        assert set(ended) >= {"work", "listen"}
        ran = Counter(msg_id for msg_id, _, _ in runs(tmp_path))
        assert len(ran) == sent
        assert set(ran.values()) == {1}
        assert len(on.archived()) == sent
        assert on.letters() == []
        assert on.events("child.ended") == on.events("internal_error") == []


@pytest.mark.timeout(180)
def test_the_listener_comes_back_each_of_twenty_times_and_reads_at_once(tmp_path: Path, database: str) -> None:
    """LISTEN again, an immediate read of what came meanwhile, a counter; the session never sits in a transaction."""
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
        states: set[str] = set()

        def listener() -> int | None:
            found = sessions(on, "listen")
            states.update(state for _, _, state in found)
            return found[0][0] if len(found) == 1 else None

        for time_round in range(1, 21):
            pid = eventually(listener, timeout_s=30, what="a listening session")
            end(on, pid)
            on.send(0)
            on.until_empty(timeout_s=20)
            eventually(
                lambda n=time_round: watch.metric("listener_reconnects_total") >= n, timeout_s=20, what="the counter"
            )
        sent_at = time.time()
        on.send(0)
        on.until_empty(timeout_s=20)
        assert runs(tmp_path)[-1][2] - sent_at < 5
        assert watch.metric("listener_reconnects_total") == 20
        assert watch.metric("wakeups_total", source="poll") == 0
        assert states <= {"idle", "active"}, "it must never be idle in a transaction"
        assert on.service.stop() == 0


def test_a_half_open_listening_socket_is_found_within_fifteen_seconds(
    tmp_path: Path, database: str, proxy: Proxy
) -> None:
    """Nothing is closed and nothing comes any more: a heartbeat finds out, and what was missed is read."""
    config = (
        HTTP
        + f"""
    [database]
    listen_dsn = "{proxy.dsn}"
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
        on.send(0)
        on.until_empty()
        proxy.freeze_open()
        began = time.monotonic()
        eventually(lambda: watch.metric("listener_reconnects_total") == 1, timeout_s=30, what="a new listener")
        assert time.monotonic() - began <= 15
        on.send(0)
        on.until_empty(timeout_s=5)
        assert on.service.stop() == 0


def test_sessions_that_idle_too_long_for_the_server_are_replaced_without_a_word(tmp_path: Path, database: str) -> None:
    """idle_session_timeout ends what we keep open: seen before the next use, so that nothing fails of it."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    polling_interval = "3s"
    notify = false
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        name = on.connection.info.dbname
        on.connection.execute(f"ALTER DATABASE {name} SET idle_session_timeout = '500ms'".encode())
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: watch.metric("database_reconnects_total") >= 5, timeout_s=60, what="replaced sessions")
        on.send(0)
        on.until_empty()
        assert on.events("claiming.failed") == []
        assert on.service.stop() == 0

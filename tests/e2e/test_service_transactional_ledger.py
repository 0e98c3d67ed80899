"""The ledger: every operation exactly once, whatever dies, and whatever answer to a COMMIT is never heard.

`make soak` makes the runs five times as long.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.proxy import Proxy
from tests.support.running import Stage, stage
from tests.support.service import Service
from tests.support.soak import SOAK
from tests.support.waiting import eventually
from tests.support.watch import pass_time

SCALE: Final = 5 if SOAK else 1
FAULTS: Final = 20
"""At least so many in each run: a quick machine gets more work, rather than fewer faults."""

# Nothing here deserves a dead letter: what dies is killed from outside.
CONFIG: Final = """
[log]
level = "warning"
[queues.jobs]
handler = "tasks:handle"
mode = "transactional"
concurrency = 4
max_attempts = 100000
max_deaths = 100000
retry = { base = "10ms", max = "50ms" }
"""

# `op` is the operation's own, stable id. A duplicate would not only be counted: it would fail, and stay.
HANDLER: Final = """
def handle(message, tx):
    op = message.body
    tx.execute("INSERT INTO ledger (op) VALUES (%s)", (op,))
    tx.execute("UPDATE account SET balance = balance + 1 WHERE id = %s", (op % 16,))
    tx.send("audit", op)
"""


def prepare(on: Stage, operations: int) -> None:
    """Business tables, the queue that is sent to, and the work."""
    on.create("jobs", "audit")
    on.connection.execute("CREATE TABLE ledger (op int PRIMARY KEY)")
    on.connection.execute("CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
    on.connection.execute("INSERT INTO account SELECT n, 0 FROM generate_series(0, 15) n")
    send(on, 1, operations)


def send(on: Stage, first: int, last: int) -> None:
    """Send operations, without a word to anybody's COMMIT: the proxy is not between."""
    on.connection.execute(
        "INSERT INTO pgmq.q_jobs (vt, message) "
        "SELECT clock_timestamp(), to_jsonb(n) FROM generate_series(%s::int, %s::int) n",
        (first, last),
    )


def check(on: Stage, operations: int) -> None:
    """Zero lost, zero duplicates: rows, sums and sent messages agree."""
    assert on.left() == 0
    assert on.letters() == []
    assert on.rows("SELECT count(*), min(op), max(op) FROM ledger") == [(operations, 1, operations)]
    assert on.rows("SELECT sum(balance) FROM account") == [(operations,)]
    assert on.rows("SELECT count(*), count(DISTINCT message) FROM pgmq.q_audit") == [(operations, operations)]


def trouble(on: Stage, operations: int, *faults: Callable[[], None], every_s: float, limit_s: float) -> int:
    """Commit faults in turn until they are enough and all work is done; gives the number of operations in the end."""
    step = operations // 2
    for count in range(int(limit_s / every_s)):
        left = on.left()
        if count >= FAULTS and left == 0:
            return operations
        if count < FAULTS and left < step:
            send(on, operations + 1, operations + step)
            operations += step
        faults[count % len(faults)]()
        pass_time(every_s)
    raise AssertionError(f"{on.left()} messages left\n{on.service.log[-4000:]}")


def children(service: Service) -> list[int]:
    """Processes that run handlers of `jobs`."""
    found = []
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"pgmq-child jobs"):
                    found.append(int(pid))
    return found


def kill_a_child(on: Stage, rng: random.Random) -> None:
    """SIGKILL, at whatever instruction it is."""
    if pids := children(on.service):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)


def end_a_backend(on: Stage, rng: random.Random) -> None:
    """Terminate the session of a child, at whatever statement it is."""
    pids = on.rows("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pgmq-supervisor jobs %'")
    if pids:
        on.rows("SELECT pg_terminate_backend(%s)", rng.choice(pids)[0])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_operation_happens_once_while_children_and_backends_die(tmp_path: Path, database: str) -> None:
    """Random kills throughout; afterwards every operation is there once, and nothing is left."""
    operations, rng = 2_000 * SCALE, random.Random(4)
    with stage(tmp_path, database, CONFIG, HANDLER) as on:
        prepare(on, operations)
        on.service.start()
        eventually(lambda: on.left() < operations, timeout_s=60, what="the first operation")
        operations = trouble(
            on,
            operations,
            lambda: kill_a_child(on, rng),
            lambda: end_a_backend(on, rng),
            every_s=0.2,
            limit_s=500,
        )
        assert on.service.stop() == 0
        check(on, operations)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_supervisors_share_a_queue_and_one_is_killed_again_and_again(tmp_path: Path, database: str) -> None:
    """Parents die too; what they held is rolled back or committed whole, and the other one goes on."""
    operations, rng = 2_000 * SCALE, random.Random(5)
    second = tmp_path / "second"
    second.mkdir()
    other = Service(second, database, CONFIG, tasks=HANDLER)
    with stage(tmp_path, database, CONFIG, HANDLER) as on, contextlib.ExitStack() as stack:
        prepare(on, operations)
        on.service.start()
        stack.callback(other.close)
        other.start()

        def kill_the_other() -> None:
            other.kill()
            other.start()

        eventually(lambda: on.left() < operations, timeout_s=60, what="the first operation")
        operations = trouble(
            on,
            operations,
            lambda: kill_a_child(on, rng),
            lambda: kill_a_child(on, rng),
            lambda: end_a_backend(on, rng),
            kill_the_other,
            every_s=0.5,
            limit_s=500,
        )
        assert other.stop() == 0
        assert on.service.stop() == 0
        check(on, operations)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_commit_whose_answer_is_lost_is_neither_repeated_nor_forgotten(
    tmp_path: Path, database: str, proxy: Proxy
) -> None:
    """The connection is cut during COMMIT, before and after it was carried out; the row decides each time."""
    operations, rng = 300 * SCALE, random.Random(6)
    with stage(tmp_path, database, CONFIG, HANDLER) as on:
        prepare(on, operations)
        on.service.dsn = proxy.dsn
        on.service.start()
        eventually(lambda: on.left() < operations, timeout_s=60, what="the first operation")

        def cut() -> None:
            trap = rng.choice((proxy.swallow_reply, proxy.cut_before))("commit")
            eventually(lambda: trap.sprung or on.left() == 0, timeout_s=60, what="a commit")

        operations = trouble(on, operations, cut, every_s=0.02, limit_s=500)
        assert on.service.stop() == 0
        check(on, operations)
        named = {event["outcome"] for event in on.events("commit.in_doubt")}
        assert named <= {"unknown", "committed", "rolled_back"}
        assert "unknown" in named


@pytest.mark.parametrize(
    ("trap", "outcome", "attempt"), [("swallow_reply", "committed", 1), ("cut_before", "rolled_back", 2)]
)
def test_an_unknown_commit_is_named_when_the_row_has_decided(
    tmp_path: Path, database: str, proxy: Proxy, trap: str, outcome: str, attempt: int
) -> None:
    """First "unknown", then what it was; done once either way, and charged only where it was not done."""
    config = CONFIG.replace('level = "warning"', 'level = "info"').replace("concurrency = 4", 'on_success = "archive"')
    with stage(tmp_path, database, config, HANDLER) as on:
        prepare(on, 1)
        on.service.dsn = proxy.dsn
        on.service.start()
        on.until_empty()
        getattr(proxy, trap)("commit")
        send(on, 2, 2)
        eventually(lambda: len(on.events("commit.in_doubt")) == 2, timeout_s=30, what="an outcome")
        on.until_empty()
        assert on.service.stop() == 0
        check(on, 2)
        assert [event["outcome"] for event in on.events("commit.in_doubt")] == ["unknown", outcome]
        assert on.archived() == [(1, 1), (2, attempt)]


def test_an_unknown_commit_is_resolved_when_the_database_is_back(tmp_path: Path, database: str, proxy: Proxy) -> None:
    """Its answer is lost, and then the whole database is away: unknown until the row can be looked at."""
    config = CONFIG.replace('level = "warning"', 'level = "info"').replace("concurrency = 4", 'on_success = "archive"')
    with stage(tmp_path, database, config, HANDLER) as on:
        prepare(on, 1)
        on.service.dsn = proxy.dsn
        on.service.start()
        on.until_empty()
        trap = proxy.swallow_reply("commit")
        send(on, 2, 2)
        trap.wait()
        proxy.refuse()
        proxy.cut()
        on.service.wait_for_log("commit.in_doubt")
        pass_time(1)
        assert [event["outcome"] for event in on.events("commit.in_doubt")] == ["unknown"]
        proxy.accept()
        eventually(lambda: len(on.events("commit.in_doubt")) == 2, timeout_s=30, what="an outcome")
        assert on.events("commit.in_doubt")[1]["outcome"] == "committed"
        assert on.service.stop() == 0
        check(on, 2)

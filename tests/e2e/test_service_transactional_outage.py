"""Transactional mode while the database restarts, is away, is silent, or cannot be written to: a ledger, each row once.

An attempt that the outage ended is rolled back, and charged when the database is back; the children live on.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest

from supervisor.embedded import EmbeddedServer, install_pgmq
from tests.support.binaries import chosen_binaries
from tests.support.folders import reachable_folder
from tests.support.proxy import Proxy
from tests.support.replication import Pair, replicated_servers
from tests.support.running import Stage, stage
from tests.support.soak import SOAK
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

CONFIG: Final = (
    HTTP
    + """
[queues.jobs]
handler = "tasks:handle"
mode = "transactional"
concurrency = 3
on_success = "archive"
retry = { base = "50ms", max = "200ms" }
"""
)
# A body is [operation, seconds]. A second row of an operation would not only be counted: it would fail, and stay.
HANDLER: Final = """
import time
def handle(message, tx):
    op, takes_s = message.body
    with open("ran", "a") as file:
        file.write(f"{op}\\n")
    tx.execute("INSERT INTO ledger (op, attempt) VALUES (%s, %s)", (op, message.attempt))
    time.sleep(takes_s)
    tx.execute("UPDATE account SET balance = balance + 1 WHERE id = %s", (op % 16,))
    tx.send("audit", op)
"""


@contextlib.contextmanager
def ledger(folder: Path, dsn: str, operations: int, *, takes_s: float = 0.005, config: str = CONFIG) -> Iterator[Stage]:
    """A service with a ledger, an account, a queue that is sent to, and so many operations to do."""
    with stage(folder, dsn, config, HANDLER) as on:
        on.create("jobs", "audit")
        on.connection.execute("CREATE TABLE ledger (op int PRIMARY KEY, attempt int NOT NULL)")
        on.connection.execute("CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
        on.connection.execute("INSERT INTO account SELECT n, 0 FROM generate_series(0, 15) n")
        if operations:
            on.send(*([op, takes_s] for op in range(1, operations + 1)))
        yield on


def starts(folder: Path) -> Counter[int]:
    """How often a handler was begun for each operation."""
    try:
        return Counter(map(int, (folder / "ran").read_text().split()))
    except FileNotFoundError:
        return Counter()


def check(on: Stage, operations: int) -> None:
    """Nothing lost, nothing twice: rows, sums, sent messages and acknowledgements agree; nobody was killed."""
    assert on.left() == 0
    assert on.letters() == []
    assert on.rows("SELECT count(*), min(op), max(op) FROM ledger") == [(operations, 1, operations)]
    assert on.rows("SELECT sum(balance) FROM account") == [(operations,)]
    assert on.rows("SELECT count(*), count(DISTINCT message) FROM pgmq.q_audit") == [(operations, operations)]
    assert on.rows("SELECT count(*), count(DISTINCT message->0) FROM pgmq.a_jobs") == [(operations, operations)]
    assert on.events("child.ended") == on.events("internal_error") == []


def again(on: Stage) -> int:
    """How many operations took more than one attempt; each of them one more, for the one outage."""
    assert on.rows("SELECT count(*) FROM ledger WHERE attempt > 2") == [(0,)]
    return int(on.rows("SELECT count(*) FROM ledger WHERE attempt = 2")[0][0])


@pytest.fixture
def server(own_server: EmbeddedServer) -> EmbeddedServer:
    """Give a server with PGMQ that may be harmed."""
    with psycopg.connect(own_server.dsn(), autocommit=True) as connection:
        install_pgmq(connection)
    return own_server


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["fast", "immediate", "kill -9"])
def test_a_restart_of_the_server_under_load_is_survived(tmp_path: Path, server: EmbeddedServer, how: str) -> None:
    """What was open is rolled back and charged once; what had committed stays; work goes on with the same children."""
    operations = 800
    with ledger(tmp_path, server.dsn(), operations) as on:
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < operations * 3 // 4, timeout_s=60, what="some of the work")
        on.connection.close()
        if how == "kill -9":
            os.kill(server.postmaster_pid, signal.SIGKILL)
        else:
            server.stop("fast" if how == "fast" else "immediate")
        eventually(lambda: not watch.is_ready, timeout_s=30, what="/readyz to tell")
        pass_time(2)
        assert watch.is_live
        server.start()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            on.connection = connection
            assert on.left() > 0
            on.until_empty()
            watch.until_ready()
            assert on.service.stop() == 0
            check(on, operations)
            assert again(on) <= 3


@pytest.mark.timeout(240)
def test_every_kind_of_session_of_ours_may_end_at_any_time(tmp_path: Path, database: str) -> None:
    """The children's, the reckoner's, the listener's, those of the pool: each is opened again, each operation once."""
    config = CONFIG + 'max_attempts = 100000\npolling_interval = "200ms"\n'
    chance = random.Random(7)
    with ledger(tmp_path, database, 0, config=config) as on:
        on.service.start()
        on.service.wait_for_log("child.ready")
        ended: Counter[str] = Counter()
        operations = 0
        while ended.total() < 100:
            operations += 10
            on.send(*([op, 0.002] for op in range(operations - 9, operations + 1)))
            sessions = eventually(
                lambda: on.rows(
                    "SELECT pid, split_part(application_name, ' ', 2) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name LIKE 'pgmq-supervisor %'"
                ),
                what="a session of ours",
            )
            by_role: dict[str, list[int]] = {}
            for pid, role in sessions:
                by_role.setdefault(role, []).append(pid)
            role = chance.choice(sorted(by_role))
            ended[role] += on.rows("SELECT pg_terminate_backend(%s)", chance.choice(by_role[role]))[0][0]
            pass_time(0.05)
        on.until_empty()
        assert on.service.stop() == 0
        check(on, operations)
        assert set(ended) >= {"jobs", "listen", "reckon", "work"}


def test_sessions_of_idle_children_are_replaced_without_a_word(tmp_path: Path, database: str) -> None:
    """What the server ended while nothing was asked is seen before the next claim, so that none fails of it."""
    with ledger(tmp_path, database, 0) as on:
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        on.send(*([op, 0.1] for op in range(1, 31)))
        on.until_empty()
        ended = on.rows(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'pgmq-supervisor jobs %'"
        )
        assert ended == [(True,)] * 3
        on.send(*([op, 0.005] for op in range(31, 61)))
        on.until_empty()
        assert watch.is_ready
        assert on.service.stop() == 0
        check(on, 60)
        assert again(on) == 0
        assert on.events("claiming.failed") == []


@pytest.mark.soak
@pytest.mark.timeout(900 if SOAK else 180)
@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_an_outage_loses_nothing(tmp_path: Path, database: str, proxy: Proxy, kind: str) -> None:
    """Connections that end take their attempts along, which are charged once; a network that is silent takes none.

    600 operations and 6 s; in a soak 10 000, and 5 minutes without a database.
    """
    operations = 10_000 if SOAK else 600
    outage_s = 300 if SOAK and kind == "refused" else 5
    with ledger(tmp_path, database, operations) as on:
        on.service.dsn = proxy.dsn
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < operations * 3 // 4, timeout_s=60, what="some of the work")
        if kind == "silent":
            proxy.freeze()
        else:
            proxy.refuse()
            proxy.cut()
        pass_time(outage_s)
        assert watch.is_live
        assert not watch.is_ready or kind == "silent"
        before = starts(tmp_path).total()
        pass_time(1)
        assert starts(tmp_path).total() == before, "handlers are begun without a database"
        if kind == "silent":
            proxy.thaw()
        else:
            proxy.accept()
        on.until_empty(timeout_s=300 if SOAK else 90)
        watch.until_ready()
        assert on.service.stop() == 0
        check(on, operations)
        assert again(on) <= (0 if kind == "silent" else 3)
        assert len(on.events("claiming.failed")) <= 1


def test_a_database_that_turns_read_only_is_waited_for(tmp_path: Path, server: EmbeddedServer) -> None:
    """Nothing can be claimed, which is said once; an open transaction goes on and commits; nothing is charged."""
    operations = 303
    with ledger(tmp_path, server.dsn(), 0) as on:
        on.send(*([op, 3] for op in (1, 2, 3)), *([op, 0.005] for op in range(4, operations + 1)))
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: len(starts(tmp_path)) == 3, timeout_s=60, what="three open transactions")
        on.connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        on.rows("SELECT pg_reload_conf()")
        eventually(lambda: "read-only" in watch.get("/readyz")[1], timeout_s=30, what="/readyz to tell")
        eventually(lambda: len(on.archived()) == 3, timeout_s=30, what="their commits")
        pass_time(4)
        assert watch.is_live
        assert len(starts(tmp_path)) == 3, "a handler is begun although nothing can be claimed"
        assert len(on.events("claiming.failed")) == 1
        on.connection.execute("SET default_transaction_read_only = off")
        on.connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        on.rows("SELECT pg_reload_conf()")
        on.until_empty()
        watch.until_ready()
        assert on.service.stop() == 0
        check(on, operations)
        assert again(on) == 0


@pytest.fixture
def small_server() -> Iterator[EmbeddedServer]:
    """Give a server that lets only twenty in."""
    settings = {"fsync": "off", "max_connections": "20"}
    with (
        reachable_folder("small") as folder,
        EmbeddedServer(folder, base=folder, explicit=True, settings=settings, binaries=chosen_binaries()) as server,
    ):
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            install_pgmq(connection)
        yield server


def test_a_server_without_a_free_connection_is_waited_for(tmp_path: Path, small_server: EmbeddedServer) -> None:
    """Every session of ours ends and none can be had: not ready, until there is room again; the children live on."""
    operations = 300
    # An operation may be met several times, until the server is full.
    with ledger(tmp_path, small_server.dsn(), operations, config=CONFIG + "max_attempts = 1000\n") as on:
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < operations, timeout_s=60, what="some of the work")
        with contextlib.ExitStack() as taken:
            eventually(lambda: has_taken_all(on, small_server.dsn(), taken), timeout_s=60, what="a full server")
            pass_time(4)
            assert watch.is_live
            assert not watch.is_ready
            left = on.left()
            assert left > 0
            pass_time(1)
            assert on.left() == left
        on.until_empty()
        watch.until_ready()
        assert on.service.stop() == 0
        check(on, operations)


def has_taken_all(on: Stage, dsn: str, taken: contextlib.ExitStack) -> bool:
    """End the sessions of the supervisor and take their places; whether it has none left."""
    on.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgmq-supervisor%'")
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            taken.enter_context(psycopg.connect(dsn, autocommit=True))
    ours = on.rows("SELECT FROM pg_stat_activity WHERE application_name LIKE 'pgmq-supervisor%'")
    return not ours


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give a primary and a standby that no commit is told without."""
    with replicated_servers(synchronous=True) as made:
        yield made


@pytest.mark.timeout(240)
def test_a_standby_is_taken_up_after_its_promotion(tmp_path: Path, pair: Pair) -> None:
    """Nothing is claimed before, and that is said once; afterwards every operation is done at its first attempt."""
    operations = 50
    with ledger(tmp_path, pair.primary.dsn(), operations) as on:
        pair.until_caught_up()
        on.service.dsn = pair.standby.dsn()
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: "standby" in watch.get("/readyz")[1], timeout_s=30, what="the reason")
        pass_time(3)
        assert watch.is_live
        assert starts(tmp_path) == Counter()
        assert on.service.log.count("hot standby") == 1
        on.connection.close()
        pair.primary.stop("immediate")
        pair.promote()
        with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
            on.connection = connection
            stop_waiting_for_standbys(connection)
            on.until_empty()
            watch.until_ready()
            assert on.service.stop() == 0
            check(on, operations)
            assert again(on) == 0


@pytest.mark.timeout(240)
def test_a_failover_under_load_loses_nothing(tmp_path: Path, pair: Pair) -> None:
    """The children, too, find the new primary; what had committed is there, what had not is done again."""
    operations = 600
    with ledger(tmp_path, pair.primary.dsn(), operations) as on:
        on.service.dsn = pair.dsn
        on.service.start()
        watch = Watch(on.service)
        eventually(lambda: on.left() < operations * 3 // 4, timeout_s=60, what="some of the work")
        on.connection.close()
        pair.primary.stop("immediate")
        eventually(lambda: not watch.is_ready, timeout_s=30, what="/readyz to tell")
        pair.promote()
        with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
            on.connection = connection
            stop_waiting_for_standbys(connection)
            on.until_empty()
            watch.until_ready()
            assert on.service.stop() == 0
            check(on, operations)
            assert again(on) <= 3


def stop_waiting_for_standbys(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """The old primary's last wish was a standby of its own; nobody follows the new one."""
    connection.execute("alter system reset synchronous_standby_names")
    connection.execute("select pg_reload_conf()")

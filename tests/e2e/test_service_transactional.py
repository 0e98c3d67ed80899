"""Transactional mode as its users meet it: business rows and the acknowledgement are both there or both absent."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.pooler import transaction_pooler
from tests.support.proxy import Proxy
from tests.support.running import Stage, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time, processor_s

CONFIG = """
[queues.jobs]
handler = "tasks:handle"
mode = "transactional"
on_success = "archive"
retry = {{ base = "100ms", jitter = false }}
{more}
"""


@contextmanager
def transactional(folder: Path, dsn: str, handler: str, more: str = "") -> Iterator[Stage]:
    """A service whose queue `jobs` runs `handler`, and a business table `effects`."""
    with stage(folder, dsn, CONFIG.format(more=more), handler) as on:
        on.create()
        on.connection.execute("CREATE TABLE effects (op int, attempt int, at timestamptz DEFAULT clock_timestamp())")
        on.connection.execute("CREATE TABLE runs (op int, attempt int, at timestamptz DEFAULT clock_timestamp())")
        yield on


# A run is noted on a connection of its own, so that a rollback does not take the note away.
NOTING = """
import os, signal, time
import psycopg

def note(message, tx):
    with psycopg.connect(tx.connection.info.dsn, autocommit=True) as other:
        other.execute("INSERT INTO runs VALUES (%s, %s)", (message.body, message.attempt))
"""


def effects(on: Stage) -> list[tuple[int, int]]:
    """What handlers have written into the business table: (operation, attempt)."""
    return [tuple(row) for row in on.rows("SELECT op, attempt FROM effects ORDER BY op, attempt")]  # type: ignore[misc]


def attempts(on: Stage) -> list[int]:
    """The attempts of which handlers took note, in order."""
    return [row[0] for row in on.rows("SELECT attempt FROM runs ORDER BY at")]


def gaps(on: Stage) -> list[float]:
    """Seconds between the runs."""
    times: list[datetime] = [row[0] for row in on.rows("SELECT at FROM runs ORDER BY at")]
    return [(after - before).total_seconds() for before, after in itertools.pairwise(times)]


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_failures_and_deaths_are_counted_and_leave_nothing_behind(tmp_path: Path, database: str) -> None:
    """Fails, dies, succeeds: three deliveries, one death, the effect of the third attempt alone."""
    handler = """
    import os, signal
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
        if message.attempt == 1:
            raise ValueError("not yet")
        if message.attempt == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with transactional(tmp_path, database, handler) as on:
        on.send(7)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(7, 3)]
        assert on.archived() == [(7, 3)]
        [(accounts,)] = on.rows("SELECT headers->'x-supervisor' FROM pgmq.a_jobs")
        assert (accounts["refunds"], accounts["deaths"]) == (0, 1)
        assert [event["delay_ms"] for event in on.events("message.retried")] == [100, 200]


def test_a_message_that_kills_its_child_each_time_is_dead_lettered_with_growing_gaps(
    tmp_path: Path, database: str
) -> None:
    """read_ct rolls back with each death, and still: three deaths, and the others do not notice."""
    handler = """
    import ctypes
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
        if message.body == 50:
            ctypes.string_at(0)
    """
    with transactional(tmp_path, database, handler, "concurrency = 3") as on:
        on.send(*range(1, 201))
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(op, 1) for op in range(1, 201) if op != 50]
        assert {read_ct for _, read_ct in on.archived()} == {1}
        [letter] = on.letters()
        assert (letter["reason"], letter["death"]["signal"]) == ("died", "SIGSEGV")
        assert (letter["source"]["deaths"], letter["source"]["attempt"], letter["source"]["deliveries"]) == (3, 3, 3)
        assert [event["delay_ms"] for event in on.events("message.retried")] == [100, 200]


def test_deadlocks_are_free_ten_times_in_a_row(tmp_path: Path, database: str) -> None:
    """One attempt allowed, a conflict each time: ten uncharged runs with backoff, and the eleventh is the last."""
    handler = (
        NOTING
        + """
def handle(message, tx):
    note(message, tx)
    tx.execute("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$")
"""
    )
    with transactional(tmp_path, database, handler, 'max_attempts = 1\nretry = { base = "5ms", max = "50ms" }') as on:
        on.service.config.write_text(on.service.config.read_text().replace('retry = { base = "100ms"', "#", 1))
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert attempts(on) == [1] * 11
        [letter] = on.letters()
        assert (letter["reason"], letter["source"]["attempt"]) == ("attempts_exhausted", 1)


def test_an_abandoned_message_comes_back_after_one_visibility_timeout_and_counts(tmp_path: Path, database: str) -> None:
    """Nothing of its work stays; at max_attempts it is not run again."""
    handler = (
        NOTING
        + """
def handle(message, tx):
    note(message, tx)
    tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
    return message.abandon()
"""
    )
    with transactional(tmp_path, database, handler, 'visibility_timeout = "1s"\nmax_attempts = 2') as on:
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert attempts(on) == [1, 2]
        assert all(gap >= 1.0 for gap in gaps(on))
        assert effects(on) == []
        assert [letter["reason"] for letter in on.letters()] == ["attempts_exhausted"]


def test_what_has_had_all_its_attempts_is_not_run(tmp_path: Path, database: str) -> None:
    """Delivered again and again without a verdict, for instance by another program: a dead letter at the next claim."""
    handler = (
        NOTING
        + """
def handle(message, tx):
    note(message, tx)
"""
    )
    with transactional(tmp_path, database, handler, "max_attempts = 5") as on:
        on.send(1)
        on.connection.execute("UPDATE pgmq.q_jobs SET read_ct = 5")
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert attempts(on) == []
        [letter] = on.letters()
        assert (letter["reason"], letter["source"]["attempt"]) == ("attempts_exhausted", 6)


def test_a_body_that_is_null_is_an_invalid_message(tmp_path: Path, database: str) -> None:
    """SQL NULL: reading `.body` ends it; the handler's work is undone."""
    handler = """
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
        assert message.raw == b""
        message.body
    """
    with transactional(tmp_path, database, handler) as on:
        on.connection.execute("INSERT INTO pgmq.q_jobs (vt, message) VALUES (now(), NULL)")
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == []
        assert [letter["reason"] for letter in on.letters()] == ["invalid_message"]


# --- a transaction that does not commit -------------------------------------------------------------------------------


def test_a_backend_terminated_between_two_statements_is_charged_with_backoff(tmp_path: Path, database: str) -> None:
    """The second statement fails, nothing commits, the next attempt does it all."""
    handler = """
    import psycopg
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
        if message.attempt == 1:
            with psycopg.connect(tx.connection.info.dsn, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", (tx.connection.info.backend_pid,))
        tx.execute("SELECT 1")
    """
    with transactional(tmp_path, database, handler) as on:
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(1, 2)]
        assert on.archived() == [(1, 2)]
        [retried] = on.events("message.retried")
        assert "57P01" in str(retried) or "terminating connection" in str(retried)


def test_an_idle_limit_has_a_clear_cause(tmp_path: Path, database: str) -> None:
    """The server ends a session that says nothing for too long; the dead letter tells of it."""
    handler = """
    import time
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
        tx.execute("SET LOCAL idle_in_transaction_session_timeout = 50")
        time.sleep(0.5)
    """
    with transactional(tmp_path, database, handler, "max_attempts = 2") as on:
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == []
        [letter] = on.letters()
        assert letter["source"]["attempt"] == 2
        assert "idle-in-transaction timeout" in letter["error"]["message"]


def test_a_swallowed_error_is_never_acknowledged(tmp_path: Path, database: str) -> None:
    """A failed INSERT that the handler ignores has aborted the transaction: a failure with a name."""
    handler = """
    import psycopg
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
        try:
            tx.execute("INSERT INTO no_such_table VALUES (1)")
        except psycopg.Error:
            pass
    """
    with transactional(tmp_path, database, handler, "max_attempts = 2") as on:
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == on.archived() == []
        [letter] = on.letters()
        assert (letter["reason"], letter["error"]["type"]) == ("attempts_exhausted", "TransactionAborted")


def test_a_constraint_at_commit_is_charged_with_backoff(tmp_path: Path, database: str) -> None:
    """Deferred to COMMIT it refuses there: growing gaps, no hot loop, a dead letter that names it."""
    handler = (
        NOTING
        + """
def handle(message, tx):
    note(message, tx)
    tx.execute("INSERT INTO strict VALUES (1)")
"""
    )
    with transactional(tmp_path, database, handler, "max_attempts = 4") as on:
        on.connection.execute("CREATE TABLE strict (id int CONSTRAINT one UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        on.connection.execute("INSERT INTO strict VALUES (1)")
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert attempts(on) == [1, 2, 3, 4]
        assert [gap >= least for gap, least in zip(gaps(on), (0.1, 0.2, 0.4), strict=True)] == [True] * 3
        [letter] = on.letters()
        assert (letter["reason"], letter["source"]["attempt"]) == ("attempts_exhausted", 4)
        assert "one" in letter["error"]["message"]
        assert on.events("commit.in_doubt") == []


BY_HAND = {
    "commit": "tx.execute('COMMIT')",
    "rollback": "tx.execute('ROLLBACK')",
    "method": "tx.connection.commit()",
    "and on": "tx.execute('COMMIT'); tx.execute('INSERT INTO effects (op, attempt) VALUES (0, 0)')",
}


@pytest.mark.parametrize("how", BY_HAND)
def test_a_transaction_ended_by_hand_counts_once_and_comes_back_with_backoff(
    tmp_path: Path, database: str, how: str
) -> None:
    """Never acknowledged, whatever was committed; each attempt is charged once, under load too."""
    handler = (
        NOTING
        + f"""
def handle(message, tx):
    if message.body:
        note(message, tx)
        if message.attempt < 3:
            {BY_HAND[how]}
"""
    )
    with transactional(tmp_path, database, handler, "concurrency = 3") as on:
        on.send(1, *[0] * 200)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert attempts(on) == [1, 2, 3]
        assert [gap >= least for gap, least in zip(gaps(on), (0.1, 0.2), strict=True)] == [True] * 2
        assert (1, 3) in on.archived()
        assert len(on.archived()) == 201
        assert effects(on) == []
        assert all("the handler committed or rolled back" in event["error"] for event in on.events("message.retried"))


def test_a_message_deleted_by_hand_is_no_success(tmp_path: Path, database: str) -> None:
    """Deleted and committed by the handler itself: it is gone, as it wished, and nobody claims to have done it."""
    handler = """
    def handle(message, tx):
        tx.execute("SELECT pgmq.delete('jobs', %s)", (message.id,))
        tx.execute("COMMIT")
    """
    with stage(tmp_path, database, HTTP + CONFIG.format(more=""), handler) as on:
        on.create()
        on.send(1)
        on.service.start()
        on.service.wait_for_log("settlement.lapsed")
        watch = Watch(on.service)
        assert watch.metric("messages_succeeded_total", queue="jobs") == 0
        assert on.events("commit.in_doubt") == []
        assert on.service.stop() == 0


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("error = ValueError('for good'); error.permanent = True; raise error", "failed"),
        ("return message.dead_letter('no')", "rejected"),
        ("message.retry(after=-1)", "failed"),
    ],
)
def test_a_verdict_outlives_its_transaction(tmp_path: Path, database: str, ending: str, reason: str) -> None:
    """The connection is gone when the handler says that the message must not come back: it does not."""
    handler = f"""
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
        tx.connection.close()
        {ending}
    """
    with transactional(tmp_path, database, handler) as on:
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == []
        [letter] = on.letters()
        assert (letter["reason"], letter["source"]["attempt"]) == (reason, 1)


def test_a_cancel_outlives_its_transaction(tmp_path: Path, database: str) -> None:
    """Cancelled while it runs; its session ends before it does: dead letter `cancelled`, not another run."""
    handler = """
    import time
    def handle(message, tx):
        print("running", flush=True)
        while not message.stop_requested:
            time.sleep(0.01)
        tx.connection.close()
    """
    with stage(tmp_path, database, CONFIG.format(more=""), handler) as on:
        on.create()
        [msg_id] = on.send(1)
        on.service.start()
        on.service.wait_for_log("running")
        cancel = [sys.executable, "-m", "supervisor", "cancel", "jobs", str(msg_id), "--config", str(on.service.config)]
        subprocess.run(cancel, check=True, cwd=tmp_path, timeout=60)
        on.until_empty()
        assert on.service.stop() == 0
        assert [letter["reason"] for letter in on.letters()] == ["cancelled"]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_hard_timeout_ends_a_long_statement_and_its_locks(tmp_path: Path, database: str) -> None:
    """Killed at its limit inside a query; the row locks of its session are gone within a second; charged."""
    handler = """
    def handle(message, tx):
        tx.execute("UPDATE effects SET attempt = 99")
        tx.execute("SELECT pg_sleep(600)")
    """
    with transactional(tmp_path, database, handler, 'hard_timeout = "1s"\nmax_deaths = 1') as on:
        on.connection.execute("INSERT INTO effects VALUES (1, 1)")
        on.send(1)
        on.service.start()
        on.service.wait_for_log('"event":"child.stopping"')
        with psycopg.connect(database) as other:
            other.execute("SET LOCAL lock_timeout = '1s'")
            other.execute("UPDATE effects SET attempt = 2")
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(1, 2)]
        [letter] = on.letters()
        assert letter["reason"] == letter["death"]["cause"] == "hard_timeout"
        assert "in handle" in letter["death"]["stack"]


def test_more_sessions_than_the_server_grants_are_refused_at_start(tmp_path: Path, database: str) -> None:
    """Both numbers stand in the message; nothing is claimed; exit code 2."""
    with transactional(tmp_path, database, "def handle(message, tx): pass\n", "concurrency = 900") as on:
        on.send(1)
        on.service.start()
        assert on.service.wait() == 2
        [(granted,)] = on.rows("SELECT current_setting('max_connections')::int")
        line = next(line for line in on.service.log.splitlines() if "connections" in line)
        numbers = [int(word.strip(",.")) for word in line.split() if word.strip(",.").isdigit()]
        assert any(number > 900 for number in numbers)
        assert any(0 < number <= granted for number in numbers)
        assert on.rows("SELECT read_ct FROM pgmq.q_jobs") == [(0,)]


def test_without_a_database_nothing_spins(tmp_path: Path, database: str, proxy: Proxy) -> None:
    """Six seconds away: parent and children use less than a twentieth of a processor, and all goes on afterwards."""
    handler = """
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (%s)", (message.body,))
    """
    with transactional(tmp_path, database, handler, "concurrency = 4") as on:
        on.service.dsn = proxy.dsn
        on.send(*range(20))
        on.service.start()
        eventually(lambda: len(on.events("child.ready")) == 4, what="all children")  # whose imports are no spinning
        on.until_empty()
        proxy.refuse()
        proxy.cut()
        on.service.wait_for_log("claiming.failed")
        children = Path(f"/proc/{on.service.pid}/task/{on.service.pid}/children").read_text().split()
        pids = [on.service.pid, *map(int, children)]
        before = sum(map(processor_s, pids))
        pass_time(6)
        assert sum(map(processor_s, pids)) - before < 0.05 * 6
        on.send(*range(20, 40))
        proxy.accept()
        on.until_empty()
        assert on.service.stop() == 0
        assert [op for (op,) in on.rows("SELECT op FROM effects ORDER BY op")] == list(range(40))
        assert len(on.events("claiming.failed")) == 1


# --- stopping ---------------------------------------------------------------------------------------------------------

SLOW_COMMIT = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION slow();
"""

COMMITTING = """
def handle(message, tx):
    tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
    print("about to commit", flush=True)
"""


def committing(on: Stage) -> bool:
    """Whether a session is in the middle of its COMMIT."""
    found = on.rows("SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = 'commit'")
    return bool(found[0][0])


@pytest.mark.parametrize("signals", [1, 2])
def test_a_granted_commit_is_waited_for(tmp_path: Path, database: str, signals: int) -> None:
    """TERM during a COMMIT of two seconds, and a second one that kills everything else: it is let through."""
    with stage(tmp_path, database, '[shutdown]\nkill_after = "8s"\n' + CONFIG.format(more=""), COMMITTING) as on:
        on.create()
        on.connection.execute("CREATE TABLE effects (op int, attempt int)")
        on.connection.execute(SLOW_COMMIT)
        on.send(1)
        on.service.start()
        eventually(lambda: committing(on), timeout_s=30, what="a commit")
        on.service.signal(signal.SIGTERM)
        if signals == 2:
            pass_time(1.1)
            on.service.signal(signal.SIGTERM)
        assert on.service.wait() == 0
        assert effects(on) == [(1, 1)]
        assert on.left() == 0


def test_after_the_grace_period_nothing_commits_and_nothing_is_charged(tmp_path: Path, database: str) -> None:
    """Killed: exit 3, no business row, and the message is visible at once with its attempts unchanged."""
    handler = """
    import time
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
        print("running", flush=True)
        time.sleep(3600)
    """
    shutdown = '[shutdown]\ngrace = "500ms"\nkill_after = "3s"\n'
    with stage(tmp_path, database, shutdown + CONFIG.format(more=""), handler) as on:
        on.create()
        on.connection.execute("CREATE TABLE effects (op int)")
        on.send(1)
        on.service.start()
        on.service.wait_for_log("running")
        assert on.service.stop() == 3
        eventually(lambda: on.rows("SELECT 1 FROM pgmq.q_jobs FOR UPDATE SKIP LOCKED"), what="a free row")
        assert on.rows("SELECT read_ct, vt <= clock_timestamp() FROM pgmq.q_jobs") == [(0, True)]
        assert on.rows("SELECT count(*) FROM effects") == [(0,)]


def test_a_stop_between_messages_is_clean(tmp_path: Path, database: str) -> None:
    """Stopped again and again under load: nothing lost, nothing twice, nothing charged, exit code 0 each time."""
    handler = """
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
    """
    with transactional(tmp_path, database, handler, "concurrency = 2") as on:
        sent = 0
        for _ in range(5):
            # However quick the machine, each stop comes with much still to do.
            more = 2000 - on.left()
            on.send(*range(sent, sent + more))
            sent += more
            on.service.start()
            eventually(lambda: on.left() < 2000, timeout_s=60, what="some work")
            assert on.service.stop() == 0
            assert on.left() > 0
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(op, 1) for op in range(sent)]


# --- sending ----------------------------------------------------------------------------------------------------------


def test_two_handlers_that_send_in_opposite_order_do_not_deadlock(tmp_path: Path, database: str) -> None:
    """What is sent waits for the commit and goes out in one order, whatever the handlers' own."""
    config = """
    [queues.one]
    handler = "tasks:one"
    mode = "transactional"
    concurrency = 2
    [queues.two]
    handler = "tasks:two"
    mode = "transactional"
    concurrency = 2
    """
    tasks = """
    import time
    def one(message, tx):
        tx.send("left", message.body)
        time.sleep(0.002)
        tx.send("right", message.body)
    def two(message, tx):
        tx.send("right", message.body)
        time.sleep(0.002)
        tx.send("left", message.body)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create("one", "two", "left", "right")
        for queue in ("left", "right"):
            on.connection.execute("SELECT pgmq.enable_notify_insert(%s, 0)", (queue,))
        on.send(*range(300), queue="one")
        on.send(*range(300), queue="two")
        on.service.start()
        on.until_empty("one")
        on.until_empty("two")
        assert on.service.stop() == 0
        assert on.events("message.retried") == []
        for queue in ("left", "right"):
            found = sorted(row[0] for row in on.rows(f"SELECT message FROM pgmq.q_{queue}"))
            assert found == sorted([*range(300), *range(300)])


def test_a_send_to_a_queue_that_is_missing_fails_the_message(tmp_path: Path, database: str) -> None:
    """Nothing of it commits; the dead letter says which queue."""
    handler = """
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
        tx.send("nowhere", {})
    """
    with transactional(tmp_path, database, handler, "max_attempts = 2") as on:
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == []
        [letter] = on.letters()
        assert letter["source"]["attempt"] == 2
        assert "q_nowhere" in letter["error"]["message"]


def test_a_missing_dead_letter_queue_holds_nobody_up(tmp_path: Path, database: str) -> None:
    """Its message comes back with backoff and keeps its verdict in the end; the others go through meanwhile."""
    handler = (
        NOTING
        + """
def handle(message, tx):
    if message.body:
        note(message, tx)
        return message.dead_letter("no")
"""
    )
    with transactional(tmp_path, database, handler, "concurrency = 2") as on:
        on.service.start()
        on.service.wait_for_log("child.ready")
        on.connection.execute("ALTER TABLE pgmq.q_jobs_dlq RENAME TO away")
        on.send(1, *[0] * 100)
        eventually(lambda: len(on.archived()) == 100, timeout_s=60, what="all the others")
        eventually(lambda: len(attempts(on)) >= 2, timeout_s=30, what="another attempt")
        assert all(gap >= 0.9 for gap in gaps(on))
        on.connection.execute("ALTER TABLE pgmq.away RENAME TO q_jobs_dlq")
        on.until_empty()
        assert on.service.stop() == 0
        assert [letter["reason"] for letter in on.letters()] == ["rejected"]


# --- other ways to work -----------------------------------------------------------------------------------------------


def test_async_handlers_have_an_async_connection(tmp_path: Path, database: str) -> None:
    """The same transaction through psycopg's async face: work, send and acknowledgement commit together."""
    handler = """
    import asyncio
    async def handle(message, tx):
        await tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
        await asyncio.sleep(0)
        async with tx.cursor() as cursor:
            await cursor.execute("SELECT count(*) FROM effects")
            assert (await cursor.fetchone())[0] >= 1
        await tx.send("next", message.body)
        if message.body == 3 and message.attempt == 1:
            raise ValueError("once")
    """
    with transactional(tmp_path, database, handler, "concurrency = 2") as on:
        on.create("next")
        on.send(*range(10))
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(op, 2 if op == 3 else 1) for op in range(10)]
        assert sorted(row[0] for row in on.rows("SELECT message FROM pgmq.q_next")) == list(range(10))


def test_claims_work_behind_a_transaction_pooler(tmp_path: Path, database: str) -> None:
    """PgBouncer in transaction mode, deaths and failures included: nothing of ours outlives a transaction there."""
    handler = """
    import os, signal
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
        if message.body == 5 and message.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if message.body == 6 and message.attempt == 1:
            raise ValueError("once")
    """
    with transaction_pooler(database) as pooled, transactional(tmp_path, database, handler, "concurrency = 3") as on:
        on.service.dsn = pooled
        on.send(*range(100))
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(op, 2 if op in (5, 6) else 1) for op in range(100)]
        prepared: list[Any] = on.rows("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'prepare%'")
        assert prepared == [(0,)]


def test_a_driver_that_deallocates_everything_costs_nothing_but_time(tmp_path: Path, database: str) -> None:
    """As the driver does after rollbacks of prepared statements: ours are made again, the message is not charged."""
    handler = """
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op, attempt) VALUES (%s, %s)", (message.body, message.attempt))
        tx.execute("DEALLOCATE ALL")
    """
    with transactional(tmp_path, database, handler) as on:
        on.send(*range(20))
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert effects(on) == [(op, 1) for op in range(20)]
        assert on.events("message.retried") == on.events("claiming.failed") == []


def test_a_handler_waits_no_longer_than_its_message_needs(tmp_path: Path, database: str) -> None:
    """A message sent to an idle queue starts in a moment: permits are given at once when it is notified."""
    handler = """
    def handle(message, tx):
        tx.execute("INSERT INTO effects (op) VALUES (1)")
    """
    with transactional(tmp_path, database, handler, 'polling_interval = "60s"') as on:
        on.service.start()
        on.service.wait_for_log("child.ready")
        pass_time(1)
        began = time.monotonic()
        on.send(1)
        on.until_empty()
        assert time.monotonic() - began < 5
        assert on.service.stop() == 0

"""Other people's locks: what they hold up, they hold up alone and for a bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg

from tests.support.running import runs, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

RECORDING = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt}\\n")
        if message.deliveries == 1:
            time.sleep(message.body)
"""


def test_a_row_that_somebody_locks_for_long_costs_no_other_lease(tmp_path: Path, database: str) -> None:
    """The others are renewed in time and run once; the locked one is stopped, and runs again when the lock is gone."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 3
    visibility_timeout = "3s"
    on_success = "archive"
    """
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        locked, *others = on.send(10, 10, 10)
        on.service.start()
        eventually(lambda: len(runs(tmp_path)) == 3, timeout_s=60, what="three running handlers")
        with psycopg.connect(database) as somebody:
            somebody.execute("SELECT FROM pgmq.q_jobs WHERE msg_id = %s FOR UPDATE", (locked,))
            eventually(lambda: on.left() == 1, timeout_s=60, what="the others' end")
        on.until_empty()
        assert on.service.stop() == 0
        deliveries = dict(on.rows("SELECT msg_id, read_ct FROM pgmq.a_jobs"))
        assert [deliveries[msg_id] for msg_id in others] == [1, 1]
        assert deliveries[locked] == 2
        [ended] = on.events("child.ended")
        assert (ended["cause"], ended["msg_id"]) == ("lease_lost", locked)
        assert runs(tmp_path)[-1] == (locked, 1)


def test_a_renewal_that_hangs_does_not_outlive_the_lease_and_starves_no_other_queue(
    tmp_path: Path, database: str
) -> None:
    """The locked table's handler is stopped by our own clock, uncharged; leases of the queue beside it are kept."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "6s"
    on_success = "archive"
    [queues.other]
    handler = "tasks:handle"
    visibility_timeout = "1s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create("jobs", "other")
        on.send(60)
        on.send(9, queue="other")
        on.service.start()
        eventually(lambda: len(runs(tmp_path)) == 2, timeout_s=60, what="two running handlers")
        watch = Watch(on.service)
        with psycopg.connect(database) as somebody:
            somebody.execute("LOCK TABLE pgmq.q_jobs IN ACCESS EXCLUSIVE MODE")
            on.service.wait_for_log('"event":"child.ended"')
            [(left_s,)] = somebody.execute(
                "SELECT extract(epoch FROM vt - clock_timestamp())::float8 FROM pgmq.q_jobs"
            ).fetchall()
            assert left_s > 0, "the handler was alive when its message could be given to somebody else"
            eventually(lambda: on.archived("other"), timeout_s=60, what="the other queue's message")
            eventually(lambda: not watch.is_ready, what="/readyz to tell")
            assert watch.is_live
        on.until_empty()
        watch.until_ready()
        assert on.service.stop() == 0
        assert on.archived("other") == [(9, 1)]
        assert on.rows("SELECT read_ct, (headers->'x-supervisor'->>'refunds')::int FROM pgmq.a_jobs") == [(2, 1)]
        [ended] = on.events("child.ended")
        assert ended["cause"] == "lease_lost"


def test_a_blocked_claim_is_told_and_heals_when_the_lock_is_gone(tmp_path: Path, database: str) -> None:
    """/readyz says so within seconds; the loop lives on; the first messages after the lock are claimed at once."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    polling_interval = "1s"
    on_success = "archive"
    """
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create()
        on.service.start()
        watch = Watch(on.service)
        watch.until_ready()
        with psycopg.connect(database) as somebody:
            somebody.execute("LOCK TABLE pgmq.q_jobs IN ACCESS EXCLUSIVE MODE")
            eventually(lambda: not watch.is_ready, timeout_s=20, what="/readyz to tell")
            assert "lock" in watch.get("/readyz")[1]
            pass_time(8)
            assert watch.is_live
            assert len(on.events("claiming.failed")) == 1
            somebody.execute("SELECT pgmq.send('jobs', '0')")
        on.until_empty(timeout_s=20)
        watch.until_ready()
        assert on.service.stop() == 0
        assert [read_ct for _, read_ct in on.archived()] == [1]


def test_tables_that_are_locked_hold_up_no_other_queue(tmp_path: Path, database: str) -> None:
    """More of them than there are sessions: messages beside them run within a second or two, and theirs afterwards."""
    locked = [f"locked_{number}" for number in range(6)]
    config = "".join(
        f"""
    [queues.{name}]
    handler = "tasks:handle"
    polling_interval = "200ms"
    on_success = "archive"
    """
        for name in [*locked, "calm"]
    )
    with stage(tmp_path, database, config, RECORDING) as on:
        on.create(*locked, "calm")
        for name in [*locked, "calm"]:
            on.send(0, queue=name)
        on.service.start()
        for name in [*locked, "calm"]:
            on.until_empty(name)
        waits = []
        with psycopg.connect(database) as somebody:
            for name in locked:
                somebody.execute(f"LOCK TABLE pgmq.q_{name} IN ACCESS EXCLUSIVE MODE")
                somebody.execute("SELECT pgmq.send(%s, '0')", [name])
            on.service.wait_for_log('"event":"claiming.failed"')
            for sent in range(2, 12):
                began = time.monotonic()
                on.send(0, queue="calm")
                eventually(lambda sent=sent: len(on.archived("calm")) == sent, timeout_s=60, what="a calm message")
                waits.append(time.monotonic() - began)
            somebody.commit()
        for name in locked:
            on.until_empty(name)
        assert on.service.stop() == 0
        assert all(len(on.archived(name)) == 2 for name in locked)
        assert max(waits) < 4, f"waits of the calm queue: {waits}"

"""The transactional mode's statements: one claim in a transaction, and the reckoning after a rollback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from shared.pgmq.statements import transactions
from tests.support.rows import DEAD, QUEUE, Rows, accounts
from tests.support.waiting import eventually


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


def _reckon(rows: Rows, msg_id: int, before: int, *, extra: int = 0, entry: str | None = None) -> tuple[Any, ...]:
    [answer] = rows.run(
        transactions.reckon_retry(QUEUE),
        msg_id=msg_id,
        before=before,
        after=before + 1 + extra,
        delay_ms=60_000,
        accounts=entry,
    )
    return answer


def test_claim_one_and_its_body_go_together(rows: Rows, database: str) -> None:
    """Numbers, identity of the transaction, and the body by a note that ends with the transaction."""
    msg_id = rows.send({"a": 1}, {"h": 2})
    with rows.connection.transaction(), psycopg.connect(database, autocommit=True) as other:
        [claimed] = rows.run(transactions.claim_one(QUEUE))
        assert claimed[:2] == (msg_id, 1)
        xid, pid, start_us = claimed[5:8]
        assert pid == rows.connection.info.backend_pid
        seen = other.execute(
            "select backend_xid::text::bigint, (extract(epoch from backend_start) * 1000000)::bigint"
            " from pg_stat_activity where pid = %s",
            [pid],
        ).fetchone()
        assert seen == (xid % 2**32, start_us)
        assert rows.run(transactions.claimed_body(QUEUE)) == [(b'{"h": 2}', b'{"a": 1}')]
        with rows.connection.transaction(force_rollback=True):
            assert rows.run(transactions.claimed_body(QUEUE))
    assert rows.run(transactions.claimed_body(QUEUE)) == []


def test_an_empty_claim_burns_no_transaction_number(rows: Rows) -> None:
    """Nothing visible: no row, no xid."""
    rows.send(1, delay_s=100)
    with rows.connection.transaction():
        assert rows.run(transactions.claim_one(QUEUE)) == []
        assert rows.run(transactions.claimed_body(QUEUE)) == []
        assert rows.ask("select pg_current_xact_id_if_assigned() is null")


def test_settlements_inside_the_transaction_match_exactly_one_row(rows: Rows) -> None:
    """Number and read_ct must be those of this claim."""
    for settle in (transactions.tx_ack_delete, transactions.tx_ack_archive):
        msg_id = rows.send(1)
        with rows.connection.transaction():
            rows.run(transactions.claim_one(QUEUE))
            assert rows.run(settle(QUEUE), msg_id=msg_id, read_ct=2) == []
            assert rows.run(settle(QUEUE), msg_id=msg_id, read_ct=1) == [(msg_id,)]
        assert rows.count() == 0
    assert rows.ask(f"select count(*) from pgmq.a_{QUEUE}") == 1


def test_retry_inside_the_transaction(rows: Rows) -> None:
    """Delay, accounts and, where charges were owed, an absolute read_ct."""
    msg_id = rows.send(1, ["list"])
    with rows.connection.transaction():
        rows.run(transactions.claim_one(QUEUE))
        done = rows.run(
            transactions.tx_retry(QUEUE),
            msg_id=msg_id,
            read_ct=1,
            delay_ms=0,
            accounts=accounts(QUEUE, msg_id, deaths=2),
            set_read_ct=4,
        )
        assert done == [(msg_id,)]
    [row] = rows.claim()
    assert row.fence.read_ct == 5
    assert rows.headers(msg_id)["x-supervisor"]["headers"] == ["list"]


def test_dead_letter_inside_the_transaction(rows: Rows) -> None:
    """Moved with the commit, back with the rollback."""
    msg_id = rows.send({"b": 1})
    parameters = {"msg_id": msg_id, "read_ct": 1, "target": DEAD, "envelope": '{"version": 1}'}
    with rows.connection.transaction(force_rollback=True):
        rows.run(transactions.claim_one(QUEUE))
        assert len(rows.run(transactions.tx_dead_letter(QUEUE), **parameters)) == 1
    assert (rows.count(), rows.count(DEAD)) == (1, 0)
    with rows.connection.transaction():
        rows.run(transactions.claim_one(QUEUE))
        rows.run(transactions.tx_dead_letter(QUEUE), **parameters)
    assert (rows.count(), rows.count(DEAD)) == (0, 1)
    assert rows.ask(f"select message -> 'message' from pgmq.q_{DEAD}") == {"b": 1}


def test_reckoning_charges_once(rows: Rows) -> None:
    """Rolled back: read_ct, accounts and backoff are written; saying it again changes nothing."""
    msg_id = rows.send(1)
    with rows.connection.transaction(force_rollback=True):
        rows.run(transactions.claim_one(QUEUE))
    entry = accounts(QUEUE, msg_id, deaths=1)
    assert _reckon(rows, msg_id, 0, extra=2, entry=entry) == (1, 0, False)
    assert _reckon(rows, msg_id, 0, extra=2, entry=entry) == (0, 3, True)
    assert rows.claim() == []
    assert rows.ask(f"select read_ct from pgmq.q_{QUEUE}") == 3
    assert rows.headers(msg_id)["x-supervisor"]["deaths"] == 1


def test_reckoning_lets_the_row_decide(rows: Rows, database: str) -> None:
    """Locked: seen with the earlier read_ct, nothing done; gone: no row; moved on: a higher read_ct."""
    msg_id = rows.send(1)
    with psycopg.connect(database) as other:
        other.execute(transactions.claim_one(QUEUE))
        assert _reckon(rows, msg_id, 0) == (0, 0, False)
        other.commit()
    assert _reckon(rows, msg_id, 0) == (0, 1, False)
    rows.connection.execute(f"delete from pgmq.q_{QUEUE}")
    assert _reckon(rows, msg_id, 0) == (0, None, False)


def test_reckoned_dead_letter(rows: Rows) -> None:
    """The last attempt was rolled back: the message goes, once."""
    msg_id = rows.send({"b": 1}, {"h": 1})
    parameters = {"msg_id": msg_id, "before": 0, "target": DEAD, "envelope": json.dumps({"version": 1})}
    assert rows.run(transactions.reckon_dead_letter(QUEUE), **parameters) == [(1, 0, False)]
    assert rows.run(transactions.reckon_dead_letter(QUEUE), **parameters) == [(0, None, False)]
    assert rows.ask(f"select message -> 'headers' from pgmq.q_{DEAD}") == {"h": 1}


def test_a_session_is_ended_only_in_that_transaction(rows: Rows, database: str) -> None:
    """pid, start and transaction must all match; behind a pooler the session may serve another by now."""
    rows.send(1)
    other = psycopg.connect(database)
    try:
        claimed = other.execute(transactions.claim_one(QUEUE)).fetchone()
        assert claimed is not None
        xid, pid, start_us = claimed[5:8]
        for wrong in ({"xid": xid + 1}, {"start_us": start_us + 1}, {"pid": pid + 100000}):
            parameters = {"pid": pid, "start_us": start_us, "xid": xid, **wrong}
            assert rows.run(transactions.TERMINATE_BACKEND, **parameters) == []
        other.rollback()
        assert rows.run(transactions.TERMINATE_BACKEND, pid=pid, start_us=start_us, xid=xid) == []
        other.execute(transactions.claim_one(QUEUE))
        xid = other.execute("select pg_current_xact_id()::text::bigint").fetchone()[0]  # type: ignore[index]
        assert rows.run(transactions.TERMINATE_BACKEND, pid=pid, start_us=start_us, xid=xid) == [(True,)]
        eventually(
            lambda: not rows.ask("select count(*) from pg_stat_activity where pid = %s", pid), what="the session's end"
        )
    finally:
        other.close()


def test_the_name_of_an_outcome_needs_a_session_that_saw_it(rows: Rows, database: str) -> None:
    """Known while a session of ours is older than the other one; unknown where it is younger."""
    with psycopg.connect(database, autocommit=True) as other:
        xid, start_us = _transaction(other)
        assert rows.run(transactions.XACT_STATUS, xid=str(xid), start_us=start_us) == [("committed",)]
        with psycopg.connect(database, autocommit=True) as younger:
            answer = younger.execute(transactions.XACT_STATUS, {"xid": str(xid), "start_us": start_us}).fetchone()
            assert answer == (None,)


def _transaction(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    row = connection.execute(
        "select pg_current_xact_id()::text::bigint, (extract(epoch from backend_start) * 1000000)::bigint"
        " from pg_stat_activity where pid = pg_backend_pid()"
    ).fetchone()
    assert row is not None
    return row[0], row[1]

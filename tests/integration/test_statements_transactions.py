"""The transactional mode's statements: one claim in a transaction, and the reckoning after a rollback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from shared.pgmq.statements import transactions
from tests.support.claims import TxClaim, claim_in, claimed_in
from tests.support.rows import DEAD, QUEUE, Rows, accounts
from tests.support.waiting import eventually


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


def _reckon(rows: Rows, claim: TxClaim, *, extra: int = 0, entry: str | None = None) -> tuple[Any, ...]:
    [answer] = rows.run(
        transactions.reckon_retry(QUEUE),
        msg_id=claim.msg_id,
        before=claim.read_ct - 1,
        after=claim.read_ct + extra,
        read_us=claim.read_us,
        delay_ms=60_000,
        accounts=entry,
    )
    return answer


def _rolled_back(rows: Rows) -> TxClaim:
    with rows.connection.transaction(force_rollback=True):
        return claimed_in(rows.connection, QUEUE)


def test_claim_one_and_its_body_go_together(rows: Rows, database: str) -> None:
    """Numbers, identity of the transaction, and the body by a note that ends with the transaction."""
    msg_id = rows.send({"a": 1}, {"h": 2})
    with rows.connection.transaction(), psycopg.connect(database, autocommit=True) as other:
        claim = claimed_in(rows.connection, QUEUE)
        assert claim[:2] == (msg_id, 1)
        assert claim.backend_pid == rows.connection.info.backend_pid
        seen = other.execute(
            "select backend_xid::text::bigint, (extract(epoch from backend_start) * 1000000)::bigint"
            " from pg_stat_activity where pid = %s",
            [claim.backend_pid],
        ).fetchone()
        assert seen == (claim.xid % 2**32, claim.backend_start_us)
        assert rows.run(transactions.claimed_body(QUEUE)) == [('{"h": 2}', '{"a": 1}')]
        with rows.connection.transaction(force_rollback=True):
            assert rows.run(transactions.claimed_body(QUEUE))
    assert rows.run(transactions.claimed_body(QUEUE)) == []


def test_a_claim_is_a_lease_where_it_is_committed(rows: Rows) -> None:
    """By a handler's own hand: the row is not free for everybody until the parent has charged it."""
    msg_id = rows.send(1)
    visible_at = rows.ask(f"select vt from pgmq.q_{QUEUE}")
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE, lease_ms=60_000)
    assert rows.claim() == []
    assert rows.ask(f"select vt > clock_timestamp() + interval '50 s' from pgmq.q_{QUEUE} where msg_id = %s", msg_id)
    assert claim.visible_us == round(visible_at.timestamp() * 1_000_000)  # type: ignore[attr-defined]


def test_claims_do_not_slow_down_with_what_was_settled(rows: Rows) -> None:
    """A row that kept its place in the index would be found dead by every later claim."""
    rows.connection.execute(
        f"insert into pgmq.q_{QUEUE} (vt, message) select clock_timestamp(), '1' from generate_series(1, 1500)"
    )
    rows.connection.execute(f"vacuum analyze pgmq.q_{QUEUE}")
    for _ in range(1200):
        with rows.connection.transaction():
            claim = claimed_in(rows.connection, QUEUE)
            assert rows.run(transactions.tx_ack_delete(QUEUE), **claim.settled_by)
    looked_at = f"select vt from pgmq.q_{QUEUE} where vt <= now() order by vt limit 1"
    [(plan,)] = rows.run(f"explain (analyze, buffers, format json) {looked_at}".encode())
    assert plan[0]["Plan"]["Shared Hit Blocks"] < 100


def test_an_empty_claim_burns_no_transaction_number(rows: Rows) -> None:
    """Nothing visible: no row, no xid."""
    rows.send(1, delay_s=100)
    with rows.connection.transaction():
        assert claim_in(rows.connection, QUEUE) is None
        assert rows.run(transactions.claimed_body(QUEUE)) == []
        assert rows.ask("select pg_current_xact_id_if_assigned() is null")


def test_settlements_inside_the_transaction_match_exactly_one_row(rows: Rows) -> None:
    """The row as the claim left it, in the transaction of the claim."""
    for settle in (transactions.tx_ack_delete, transactions.tx_ack_archive):
        msg_id = rows.send(1)
        with rows.connection.transaction():
            claim = claimed_in(rows.connection, QUEUE)
            for wrong in ({"xid": claim.xid + 1}, {"msg_id": msg_id + 1}, {"place": "(77,7)"}):
                assert rows.run(settle(QUEUE), **{**claim.settled_by, **wrong}) == []
            with rows.connection.transaction(force_rollback=True):
                rows.connection.execute(f"update pgmq.q_{QUEUE} set read_ct = read_ct")
                assert rows.run(settle(QUEUE), **claim.settled_by) == []
            assert rows.run(settle(QUEUE), **claim.settled_by) == [(msg_id,)]
        assert rows.count() == 0
    assert rows.ask(f"select count(*) from pgmq.a_{QUEUE}") == 1


def test_another_transaction_settles_nothing(rows: Rows) -> None:
    """The claim was committed; what follows is not the handler's transaction any more."""
    rows.send(1)
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE)
    with rows.connection.transaction():
        assert rows.run(transactions.tx_ack_delete(QUEUE), **claim.settled_by) == []
    assert rows.count() == 1


def test_retry_inside_the_transaction(rows: Rows) -> None:
    """Delay, accounts and, where charges were owed, an absolute read_ct."""
    msg_id = rows.send(1, ["list"])
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE)
        done = rows.run(
            transactions.tx_retry(QUEUE),
            **claim.settled_by,
            delay_ms=0,
            accounts=accounts(QUEUE, msg_id, deaths=2),
            read_us=claim.read_us,
            set_read_ct=4,
        )
        assert done == [(msg_id,)]
    assert _reckon(rows, claim, extra=3) == (0, 4, claim.read_us + 1)  # the reckoning knows it for its own
    [row] = rows.claim()
    assert row.fence.read_ct == 5
    assert rows.headers(msg_id)["x-supervisor"]["headers"] == ["list"]


def test_dead_letter_inside_the_transaction(rows: Rows) -> None:
    """Moved with the commit, back with the rollback."""
    rows.send({"b": 1})
    letter = {"target": DEAD, "envelope": '{"version": 1}'}
    with rows.connection.transaction(force_rollback=True):
        claim = claimed_in(rows.connection, QUEUE)
        assert len(rows.run(transactions.tx_dead_letter(QUEUE), **claim.settled_by, **letter)) == 1
    assert (rows.count(), rows.count(DEAD)) == (1, 0)
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE)
        rows.run(transactions.tx_dead_letter(QUEUE), **claim.settled_by, **letter)
    assert (rows.count(), rows.count(DEAD)) == (0, 1)
    assert rows.ask(f"select message -> 'message' from pgmq.q_{DEAD}") == {"b": 1}


def test_reckoning_charges_once(rows: Rows) -> None:
    """Rolled back: read_ct, accounts and backoff are written; saying it again changes nothing, and knows its own."""
    msg_id = rows.send(1)
    claim = _rolled_back(rows)
    entry = accounts(QUEUE, msg_id, deaths=1)
    assert _reckon(rows, claim, extra=2, entry=entry) == (1, 0, 0)
    assert _reckon(rows, claim, extra=2, entry=entry) == (0, 3, claim.read_us + 1)
    assert rows.claim() == []
    assert rows.ask(f"select read_ct from pgmq.q_{QUEUE}") == 3
    assert rows.headers(msg_id)["x-supervisor"]["deaths"] == 1


def test_reckoning_finds_a_claim_that_was_committed_by_hand(rows: Rows) -> None:
    """It counts once, and comes back after its backoff; another claim with the same read_ct is not taken for it."""
    rows.send(1)
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE)
    other = claim._replace(read_us=claim.read_us - 1)
    assert _reckon(rows, other) == (0, 1, claim.read_us)
    assert _reckon(rows, claim) == (1, 1, claim.read_us)
    assert _reckon(rows, claim) == (0, 1, claim.read_us + 1)
    assert rows.ask(f"select read_ct from pgmq.q_{QUEUE}") == 1


def test_reckoning_lets_the_row_decide(rows: Rows, database: str) -> None:
    """Locked: seen with the earlier read_ct, nothing done; gone: no row; moved on: a higher read_ct."""
    rows.send(1)
    claim = _rolled_back(rows)
    with psycopg.connect(database) as other:
        theirs = claimed_in(other, QUEUE)
        assert _reckon(rows, claim) == (0, 0, 0)
        other.commit()
    assert _reckon(rows, claim) == (0, 1, theirs.read_us)
    rows.connection.execute(f"delete from pgmq.q_{QUEUE}")
    assert _reckon(rows, claim) == (0, None, 0)


def test_reckoned_dead_letter(rows: Rows) -> None:
    """The last attempt was rolled back: the message goes, once."""
    rows.send({"b": 1}, {"h": 1})
    claim = _rolled_back(rows)
    letter = {"target": DEAD, "envelope": json.dumps({"version": 1})}
    parameters = {"msg_id": claim.msg_id, "before": 0, "read_us": claim.read_us, **letter}
    assert rows.run(transactions.reckon_dead_letter(QUEUE), **parameters) == [(1, 0, 0)]
    assert rows.run(transactions.reckon_dead_letter(QUEUE), **parameters) == [(0, None, 0)]
    assert rows.ask(f"select message -> 'headers' from pgmq.q_{DEAD}") == {"h": 1}


def test_a_session_is_ended_only_in_that_transaction(rows: Rows, database: str) -> None:
    """pid, start and transaction must all match; behind a pooler the session may serve another by now."""
    rows.send(1)
    other = psycopg.connect(database)
    try:
        claim = claimed_in(other, QUEUE)
        named = {"pid": claim.backend_pid, "start_us": claim.backend_start_us, "xid": claim.xid}
        assert rows.run(transactions.IS_AT_WORK, **named) == [(True,)]
        for wrong in ({"xid": claim.xid + 1}, {"start_us": claim.backend_start_us + 1}, {"pid": 1 << 30}):
            assert rows.run(transactions.TERMINATE_BACKEND, **{**named, **wrong}) == []
            assert rows.run(transactions.IS_AT_WORK, **{**named, **wrong}) == [(False,)]
        other.rollback()
        assert rows.run(transactions.TERMINATE_BACKEND, **named) == []
        assert rows.run(transactions.IS_AT_WORK, **named) == [(False,)]
        named["xid"] = claimed_in(other, QUEUE).xid
        assert rows.run(transactions.TERMINATE_BACKEND, **named) == [(True,)]
        eventually(
            lambda: not rows.ask("select count(*) from pg_stat_activity where pid = %s", claim.backend_pid),
            what="the session's end",
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


# --- what somebody had before -----------------------------------------------------------------------------------------


def _touched(rows: Rows) -> bool:
    return _rolled_back(rows).touched


def _lock(rows: Rows) -> None:
    rows.connection.execute(f"select from pgmq.q_{QUEUE} for update")


def test_a_claim_tells_whether_the_last_one_was_rolled_back(rows: Rows) -> None:
    """Only that: a charge, a retry, a refund and a lock that was let go by a commit leave no trace of this kind."""
    rows.send(1)
    assert not _touched(rows)
    assert _touched(rows)
    assert _touched(rows)
    claim = _rolled_back(rows)
    assert _reckon(rows, claim)[0] == 1
    rows.expire(claim.msg_id)
    assert not _touched(rows)
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE)
        assert claim.touched
        rows.connection.execute("savepoint here")
        rows.connection.execute("rollback to savepoint here")
        more = {"delay_ms": 0, "accounts": None, "read_us": claim.read_us, "set_read_ct": None}
        assert rows.run(transactions.tx_retry(QUEUE), **claim.settled_by, **more)
    assert not _touched(rows)
    _lock(rows)
    assert not _touched(rows)
    with rows.connection.transaction(force_rollback=True):
        _lock(rows)
    assert _touched(rows)


@pytest.mark.parametrize("number", ["1", "2", "3", "4294967295", "2147483648", "4000000000"])
def test_no_number_in_the_place_of_a_holder_breaks_a_claim(rows: Rows, number: str) -> None:
    """A row may be frozen, restored, or held by many at once: then the number is none of a transaction that we know."""
    statement = transactions.claim_one(QUEUE, pooled=True)
    assert statement.count(b"d.holder") == 2
    rows.send(1)
    with rows.connection.transaction(force_rollback=True):
        forged = statement.replace(b"d.holder", f"'{number}'::xid".encode())
        assert len(rows.run(forged, lease_ms=30_000, limit_ms="0")) == 1


def test_a_pause_leaves_the_row_to_whoever_has_to_charge_it(rows: Rows) -> None:
    """Nobody claims it meanwhile, its charge finds it, and a later claim does not find it touched."""
    rows.send(1)
    mine = _rolled_back(rows)
    other = _rolled_back(rows)
    pause = {"msg_id": other.msg_id, "before": other.read_ct - 1}
    rows.run(transactions.tx_postpone(QUEUE), **pause, delay_ms=60_000)
    assert claim_in(rows.connection, QUEUE) is None
    rows.expire(mine.msg_id)
    assert not _touched(rows)
    rows.run(transactions.tx_postpone(QUEUE), **pause, delay_ms=60_000)
    assert _reckon(rows, mine)[0] == 1


def test_a_pause_changes_nothing_that_is_settled_or_held(rows: Rows, database: str) -> None:
    """It comes after the rollback, and somebody may have been quicker."""
    rows.send(1)
    claim = _rolled_back(rows)
    pause = {"msg_id": claim.msg_id, "before": claim.read_ct - 1, "delay_ms": 60_000}
    with psycopg.connect(database) as other:
        held = claimed_in(other, QUEUE)
        rows.run(transactions.tx_postpone(QUEUE), **pause)
        other.rollback()
    assert held.msg_id == claim.msg_id
    assert _touched(rows)
    assert _reckon(rows, claim)[0] == 1
    charged = rows.ask(f"select vt from pgmq.q_{QUEUE}")
    rows.run(transactions.tx_postpone(QUEUE), **pause)
    assert rows.ask(f"select vt from pgmq.q_{QUEUE}") == charged

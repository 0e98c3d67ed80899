"""A transactional child against a real database: what commits, what does not, and what the parent is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from shared.wire.frames import Frame, Kind
from tests.support.childharness import ChildHarness
from tests.support.databases import with_dbname
from tests.support.pooler import transaction_pooler
from tests.support.waiting import eventually

ACK = {"verdict": "ack", "mode": "delete", "keep_work": True}
REFUSE = {"verdict": "refuse"}


@pytest.fixture
def db(database: str) -> Iterator[psycopg.Connection[Any]]:
    """The observer's connection, with queues and a business table."""
    with psycopg.connect(database, autocommit=True) as connection:
        for queue in ("orders", "orders_dlq", "orders_next", "audit"):
            connection.execute("select pgmq.create(%s)", (queue,))
        connection.execute("create table bookings (msg_id bigint)")
        connection.execute(
            "create table strict (id int constraint one unique deferrable initially deferred);"
            " insert into strict values (1)"
        )
        yield connection


class TxChild(ChildHarness):
    """A transactional child of queue `orders`."""

    def __init__(self, handler: str, dsn: str, **options: Any) -> None:
        extra = {
            "dsn": dsn,
            "statement_timeout_ms": 5000,
            "application_name": "pgmq-supervisor orders 1.1",
            "dead_letter_queue": "orders_dlq",
        }
        super().__init__(f"in_transaction:{handler}", mode="transactional", hello=extra, **options)

    def permit(self, *, time_limit_ms: int | None = None, owed: tuple[tuple[int, int, int], ...] = ()) -> int:
        """Grant one claim; its seq."""
        self._seq += 1
        meta = {"time_limit_ms": time_limit_ms, "owed": [list(charge) for charge in owed]}
        self.send(Kind.PERMIT, self._seq, meta)
        return self._seq

    def claim(self, **options: Any) -> tuple[int, dict[str, Any]]:
        """Grant a claim that finds a message; its seq and what was told of it."""
        seq = self.permit(**options)
        claimed = self.expect(Kind.TX_CLAIMED, seq)
        if claimed.meta["touched"]:  # somebody had it before and gave it up: the parent says whether it may go on
            self.send(Kind.VERDICT, seq, {"verdict": "go"})
        self.expect(Kind.STARTED, seq)
        return seq, claimed.meta

    def ask(self, **options: Any) -> tuple[int, dict[str, Any]]:
        """Run one message up to the request to commit; its seq and the outcome."""
        seq, _ = self.claim(**options)
        return seq, self.expect(Kind.COMMIT_REQUEST, seq).meta

    def answer(self, seq: int, verdict: dict[str, Any]) -> Frame:
        """Give the verdict and wait for the end."""
        self.send(Kind.VERDICT, seq, verdict)
        frame = self.receive()
        assert frame.seq == seq
        return frame

    def ended(self, **options: Any) -> dict[str, Any]:
        """Run one message that ends without a commit, although it is granted where it is asked for."""
        seq, _ = self.claim(**options)
        frame = self.receive()
        if frame.kind is Kind.COMMIT_REQUEST:
            assert frame.meta == {"kind": "success"}
            frame = self.answer(seq, ACK)
        assert (frame.kind, frame.seq) == (Kind.TX_ENDED, seq)
        return frame.meta


def send(db: psycopg.Connection[Any], body: object, headers: object = None, delay: int = 0) -> int:
    """Put a message into `orders`."""
    row = db.execute(
        "select pgmq.send('orders', %s::jsonb, %s::jsonb, %s)",
        (json.dumps(body), None if headers is None else json.dumps(headers), delay),
    ).fetchone()
    assert row is not None
    return int(row[0])


def count(db: psycopg.Connection[Any], table: str) -> int:
    """Rows of a table."""
    row = db.execute(f"select count(*) from {table}").fetchone()
    assert row is not None
    return int(row[0])


def await_idle_after(db: psycopg.Connection[Any], backend_pid: int, query: str) -> None:
    """Wait until a session has done a statement and rests in its transaction."""
    look = "select state = 'idle in transaction' and query like %s from pg_stat_activity where pid = %s"
    eventually(lambda: db.execute(look, (query, backend_pid)).fetchone() == (True,))


def read_ct(db: psycopg.Connection[Any], msg_id: int) -> tuple[int, bool] | None:
    """read_ct and whether the message is visible."""
    return db.execute("select read_ct, vt <= now() from pgmq.q_orders where msg_id = %s", (msg_id,)).fetchone()


def test_work_and_ack_commit_together(db: psycopg.Connection[Any], database: str) -> None:
    """Business row and delete become visible at once, after the verdict and not before."""
    msg_id = send(db, {"a": 1})
    with TxChild("book", database) as child:
        seq, claimed = child.claim()
        assert (claimed["msg_id"], claimed["read_ct"], claimed["accounts"]) == (msg_id, 1, None)
        assert claimed["xid"] > 0
        assert child.expect(Kind.COMMIT_REQUEST, seq).meta == {"kind": "success"}
        assert (count(db, "bookings"), count(db, "pgmq.q_orders")) == (0, 1)
        assert child.answer(seq, ACK).kind is Kind.COMMITTED
        assert (count(db, "bookings"), count(db, "pgmq.q_orders")) == (1, 0)


def test_archive(db: psycopg.Connection[Any], database: str) -> None:
    """The verdict says how to acknowledge."""
    send(db, "result = message.archive()")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome == {"kind": "success", "ack": "archive"}
        assert child.answer(seq, {**ACK, "mode": "archive"}).kind is Kind.COMMITTED
        assert count(db, "pgmq.a_orders") == 1


def test_empty_leaves_no_transaction_and_says_when(db: psycopg.Connection[Any], database: str) -> None:
    """TX_EMPTY with the next visible time; the session is idle and no number was used."""
    with TxChild("book", database) as child:
        before = db.execute("select pg_snapshot_xmax(pg_current_snapshot())").fetchone()
        seq = child.permit()
        assert child.expect(Kind.TX_EMPTY, seq).meta["next_visible_s"] is None
        assert db.execute("select pg_snapshot_xmax(pg_current_snapshot())").fetchone() == before
        send(db, "x", delay=30)
        seq = child.permit()
        assert 28 < child.expect(Kind.TX_EMPTY, seq).meta["next_visible_s"] <= 30
        state = db.execute("select state from pg_stat_activity where application_name like 'pgmq-supervisor%'")
        assert state.fetchall() == [("idle",)]


def test_a_retry_undoes_the_work_and_keeps_the_count(db: psycopg.Connection[Any], database: str) -> None:
    """Back to the savepoint, then the retry with absolute accounts; read_ct is committed."""
    msg_id = send(db, "raise ValueError('no')")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome["error"]["type"] == "ValueError"
        accounts = json.dumps({"queue": "orders", "msg_id": msg_id, "refunds": 0, "deaths": 1})
        verdict = {"verdict": "retry", "delay_ms": 60_000, "accounts": accounts, "read_ct": None}
        assert child.answer(seq, verdict).kind is Kind.COMMITTED
        assert count(db, "bookings") == 0
        assert read_ct(db, msg_id) == (1, False)
        row = db.execute("select headers->'x-supervisor'->>'deaths' from pgmq.q_orders").fetchone()
        assert row == ("1",)


def test_a_dead_letter_undoes_the_work_and_moves_the_message(db: psycopg.Connection[Any], database: str) -> None:
    """Envelope and source in one transaction."""
    send(db, "raise message.dead_letter('bad')")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome == {"kind": "reject", "reason": "bad"}
        envelope = json.dumps({"version": 1, "reason": "rejected", "source": {"queue": "orders"}})
        frame = child.answer(seq, {"verdict": "dead_letter", "queue": "orders_dlq", "envelope": envelope})
        assert frame.kind is Kind.COMMITTED
        assert (count(db, "bookings"), count(db, "pgmq.q_orders"), count(db, "pgmq.q_orders_dlq")) == (0, 0, 1)


def test_a_refusal_rolls_everything_back(db: psycopg.Connection[Any], database: str) -> None:
    """The message is as it was."""
    msg_id = send(db, 1)
    with TxChild("book", database) as child:
        seq, _ = child.ask()
        frame = child.answer(seq, REFUSE)
        assert (frame.kind, frame.meta["error"], frame.meta["claimed"]) == (Kind.TX_ENDED, None, True)
        assert (count(db, "bookings"), read_ct(db, msg_id)) == (0, (0, True))


def test_what_shall_wait_is_given_back_and_waits(db: psycopg.Connection[Any], database: str) -> None:
    """Claimed after somebody's rollback: its count is as before, nobody finds it for the time that the parent says."""
    msg_id = send(db, 1)
    with db.transaction(force_rollback=True):
        db.execute("select from pgmq.q_orders for update")
    with TxChild("book", database) as child:
        seq = child.permit()
        assert child.expect(Kind.TX_CLAIMED, seq).meta["touched"] is True
        ended = child.answer(seq, {"verdict": "postpone", "delay_ms": 60_000})
        assert (ended.kind, ended.meta["error"], ended.meta["claimed"]) == (Kind.TX_ENDED, None, True)
        assert read_ct(db, msg_id) == (0, False)
        seq = child.permit()
        assert 50 < child.expect(Kind.TX_EMPTY, seq).meta["next_visible_s"] <= 60
        db.execute("update pgmq.q_orders set vt = now()")
        seq = child.permit()
        assert child.expect(Kind.TX_CLAIMED, seq).meta["touched"] is False
        child.expect(Kind.STARTED, seq)


def test_attempts_are_counted_with_refunds_and_debts(db: psycopg.Connection[Any], database: str) -> None:
    """The attempt is read_ct + owed - refunds, from the headers that belong to this message only."""
    msg_id = send(db, "result = message.dead_letter(f'{message.attempt} {message.deliveries} {message.headers}')")
    own = json.dumps({"x-supervisor": {"queue": "orders", "msg_id": msg_id, "refunds": 2}, "k": 1})
    db.execute("update pgmq.q_orders set read_ct = 6, headers = %s::jsonb", (own,))
    with TxChild("execute", database) as child:
        seq, outcome = child.ask(owed=((msg_id, 3, 0), (999, 5, 1)))
        assert outcome["reason"] == "8 7 {'k': 1}"
        child.answer(seq, REFUSE)
        db.execute("update pgmq.q_orders set headers = jsonb_set(headers, '{x-supervisor,msg_id}', '1000')")
        seq, outcome = child.ask()
        assert outcome["reason"] == "7 7 {'k': 1}"


# --- send -------------------------------------------------------------------------------------------------------------


def test_send_waits_for_the_commit_and_is_sorted(db: psycopg.Connection[Any], database: str) -> None:
    """Nothing is inserted, and no throttle row locked, before the verdict; then queue by queue."""
    code = """
tx.send("orders_next", {"n": 10**500}, headers={"h": 1}, delay="1h")
tx.send("audit", [1])
tx.send("orders_next", "second")
result = tx.execute("select count(*) from pgmq.q_orders_next").fetchone() == (0,) or message.dead_letter("early")
"""
    send(db, code)
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome == {"kind": "success"}
        assert child.answer(seq, ACK).kind is Kind.COMMITTED
        rows = db.execute("select message, headers, vt > now() from pgmq.q_orders_next order by msg_id").fetchall()
        assert rows[0][1:] == ({"h": 1}, True)
        assert rows[1] == ("second", None, False)
        assert count(db, "pgmq.q_audit") == 1
        order = db.execute("select 'audit', xmin::text::bigint from pgmq.q_audit").fetchall()
        assert len(order) == 1


def test_a_failed_send_fails_the_message(db: psycopg.Connection[Any], database: str) -> None:
    """No such queue: nothing is committed, the error says why."""
    msg_id = send(db, "tx.send('nowhere', 1)")
    with TxChild("execute", database) as child:
        seq, _ = child.ask()
        frame = child.answer(seq, ACK)
        assert (frame.kind, frame.meta["sqlstate"], frame.meta["in_doubt"]) == (Kind.TX_ENDED, "42P01", False)
        assert (count(db, "bookings"), read_ct(db, msg_id)) == (0, (0, True))
        seq, _ = child.ask()  # the session goes on
        child.answer(seq, REFUSE)


@pytest.mark.parametrize(
    "call", ["'Bad Name', 1", "'audit', object()", "'audit', float('nan')", "'audit', 1, delay=-1"]
)
def test_a_send_that_cannot_be_is_refused_at_once(db: psycopg.Connection[Any], database: str, call: str) -> None:
    """The handler sees the error where it made it."""
    send(db, f"tx.send({call})")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome["kind"] == "error"
        assert outcome.get("permanent", False) is ("delay" in call)
        child.answer(seq, REFUSE)


# --- async ------------------------------------------------------------------------------------------------------------


def test_async_handlers_share_the_transaction(db: psycopg.Connection[Any], database: str) -> None:
    """The async face of the same session: work, send and ack commit together, message after message."""
    with TxChild("book_async", database) as child:
        for _ in range(3):
            send(db, "work")
            seq, outcome = child.ask()
            assert outcome == {"kind": "success"}
            assert child.answer(seq, ACK).kind is Kind.COMMITTED
        assert (count(db, "bookings"), count(db, "pgmq.q_orders_next")) == (9, 3)
        send(db, "raise")
        seq, outcome = child.ask()
        assert outcome["error"]["message"] == "asked to"
        child.answer(seq, REFUSE)
        db.execute("delete from pgmq.q_orders")
        send(db, "commit")
        assert child.ended()["error"]["type"] == "TransactionEndedByHandler"


# --- what a handler must not do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "tx.execute('commit')",
        "tx.execute('rollback')",
        "tx.connection.commit()",
        "tx.connection.rollback()",
        "tx.execute('commit'); tx.execute('insert into bookings values (7)')",
        "tx.execute('rollback; begin; savepoint pgmq_supervisor_handler')",
        "tx.execute('commit; begin'); tx.connection.commit(); tx.connection.autocommit = True; tx.execute('select 1')",
        "tx.connection.commit(); raise ValueError('after it')",
    ],
)
def test_ending_the_transaction_is_never_an_ack(db: psycopg.Connection[Any], database: str, code: str) -> None:
    """Found by the transaction's number and the savepoint; the next message gets a fresh session."""
    send(db, code)
    with TxChild("execute", database) as child:
        ended = child.ended()
        assert ended["error"]["type"] == "TransactionEndedByHandler"
        assert ended["claimed"] is True
        assert ("after it" in ended["error"]["traceback"]) == ("after it" in code)
        assert count(db, "pgmq.q_orders") == 1
        db.execute("delete from pgmq.q_orders")
        send(db, "pass")
        seq, _ = child.ask()
        assert child.answer(seq, ACK).kind is Kind.COMMITTED


def test_a_released_savepoint_is_found_before_the_work_is_undone(db: psycopg.Connection[Any], database: str) -> None:
    """Without it a retry could not undo the work, so that no commit is asked for."""
    send(db, "tx.execute('release savepoint pgmq_supervisor_handler'); raise ValueError('x')")
    with TxChild("execute", database) as child:
        assert child.ended()["error"]["type"] == "TransactionEndedByHandler"
        assert count(db, "bookings") == 0


@pytest.mark.parametrize("close", ["tx.connection.close()", "os.close(tx.connection.fileno())"])
def test_a_closed_connection_is_never_an_ack(db: psycopg.Connection[Any], database: str, close: str) -> None:
    """Rolled back by the server; the next permit connects again."""
    send(db, close)
    with TxChild("execute", database) as child:
        ended = child.ended()
        assert (ended["claimed"], ended["in_doubt"]) == (True, False)
        eventually(lambda: child_sessions(db) == 0, what="the end of the session")
        db.execute("update pgmq.q_orders set message = '\"pass\"'")
        seq, _ = child.ask()
        assert child.answer(seq, ACK).kind is Kind.COMMITTED


def child_sessions(db: psycopg.Connection[Any]) -> int:
    """Sessions of children that hold a transaction."""
    row = db.execute(
        "select count(*) from pg_stat_activity"
        " where application_name like 'pgmq-supervisor%' and xact_start is not null"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize(
    "code",
    [
        "contextlib.suppress(Exception).__enter__()\ntry:\n    tx.execute('select 1/0')\nexcept Exception:\n    pass",
        "try:\n    tx.execute('insert into nowhere values (1)')\nexcept psycopg.Error:\n    pass",
    ],
)
def test_a_swallowed_error_is_a_failure(db: psycopg.Connection[Any], database: str, code: str) -> None:
    """The transaction was aborted: undone to the savepoint, told as an error, and the retry commits."""
    msg_id = send(db, code)
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert (outcome["kind"], outcome["error"]["type"]) == ("error", "TransactionAborted")
        verdict = {"verdict": "retry", "delay_ms": 0, "accounts": None, "read_ct": 9}
        assert child.answer(seq, verdict).kind is Kind.COMMITTED
        assert (count(db, "bookings"), read_ct(db, msg_id)) == (0, (9, True))


@pytest.mark.parametrize(
    "call",
    [
        "pgmq.delete('orders', %s)",
        "pgmq.archive('orders', %s)",
        "pgmq.set_vt('orders', %s, 60)",
    ],
)
def test_acknowledging_by_hand_is_a_failure(db: psycopg.Connection[Any], database: str, call: str) -> None:
    """Rolled back, told as an error; the message is still there."""
    send(db, f'tx.execute("select {call}", (message.id,))')
    with TxChild("execute", database) as child:
        ended = child.ended()
        assert (ended["error"]["type"], ended["in_doubt"]) == ("AcknowledgedByHand", False)
        assert (count(db, "pgmq.q_orders"), count(db, "pgmq.a_orders"), count(db, "bookings")) == (1, 0, 0)


def test_a_database_error_tells_its_sqlstate(db: psycopg.Connection[Any], database: str) -> None:
    """Also one that was wrapped; the transaction is mended for the retry."""
    send(db, "try:\n    tx.execute('select 1/0')\nexcept Exception as e:\n    raise RuntimeError('wrapped') from e")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert (outcome["sqlstate"], outcome["error"]["type"]) == ("22012", "RuntimeError")
        child.answer(seq, REFUSE)


def test_a_deferred_constraint_is_told_and_not_in_doubt(db: psycopg.Connection[Any], database: str) -> None:
    """PostgreSQL refused the COMMIT."""
    msg_id = send(db, "tx.execute('insert into strict values (1)')")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome == {"kind": "success"}
        frame = child.answer(seq, ACK)
        assert frame.kind is Kind.TX_ENDED
        assert (frame.meta["sqlstate"], frame.meta["in_doubt"], frame.meta["claimed"]) == ("23505", False, True)
        assert (count(db, "bookings"), read_ct(db, msg_id)) == (0, (0, True))
        seq, _ = child.ask()
        child.answer(seq, REFUSE)


def test_a_connection_lost_during_commit_is_in_doubt(db: psycopg.Connection[Any], database: str) -> None:
    """COMMIT was sent and no answer came, whatever was said before the end."""
    db.execute(
        """
        create function leave() returns trigger language plpgsql as
            $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$;
        create constraint trigger leave after insert on bookings deferrable initially deferred
            for each row execute function leave();
        """
    )
    send(db, 1)
    with TxChild("book", database) as child:
        seq, _ = child.ask()
        frame = child.answer(seq, ACK)
        assert frame.kind is Kind.TX_ENDED
        assert (frame.meta["in_doubt"], frame.meta["claimed"]) == (True, True)
        db.execute("drop trigger leave on bookings")
        seq, _ = child.ask()
        assert child.answer(seq, ACK).kind is Kind.COMMITTED


def test_leftovers_of_a_handler_do_not_reach_the_next(db: psycopg.Connection[Any], database: str) -> None:
    """Row factories are reset, and a kept `tx` is dead."""
    send(db, "import builtins; builtins.kept = tx; tx.connection.row_factory = psycopg.rows.dict_row")
    with TxChild("execute", database) as child:
        seq, _ = child.ask()
        assert child.answer(seq, ACK).kind is Kind.COMMITTED
        send(db, "result = message.dead_letter(repr(tx.execute('select 1').fetchone()))")
        seq, outcome = child.ask()
        assert outcome["reason"] == "(1,)"
        child.answer(seq, REFUSE)
        db.execute("delete from pgmq.q_orders")
        send(db, "kept.execute('select 1')")
        seq, outcome = child.ask()
        assert outcome["error"]["type"] == "RuntimeError"
        child.answer(seq, REFUSE)


# --- connections and limits -------------------------------------------------------------------------------------------


def test_a_backend_terminated_in_the_handler(db: psycopg.Connection[Any], database: str) -> None:
    """Nothing commits, the cause is told, and the next permit connects again."""
    msg_id = send(db, "tx.execute('select pg_terminate_backend(pg_backend_pid())')")
    with TxChild("execute", database) as child:
        ended = child.ended()
        assert (ended["sqlstate"], ended["in_doubt"], ended["claimed"]) == ("57P01", False, True)
        assert (count(db, "bookings"), read_ct(db, msg_id)) == (0, (0, True))
        db.execute("update pgmq.q_orders set message = '\"pass\"'")
        seq, _ = child.ask()
        assert child.answer(seq, ACK).kind is Kind.COMMITTED


def test_a_backend_terminated_while_the_handler_works(db: psycopg.Connection[Any], database: str) -> None:
    """It notices nothing and returns; no commit is asked for."""
    send(db, "__import__('select').select([tx.connection.fileno()], [], [], 15)")  # until the farewell is there
    with TxChild("execute", database) as child:
        seq, claimed = child.claim()
        await_idle_after(db, claimed["backend_pid"], "insert into bookings%")
        db.execute("select pg_terminate_backend(%s)", (claimed["backend_pid"],))
        ended = child.expect(Kind.TX_ENDED, seq).meta
        assert (ended["sqlstate"], ended["in_doubt"]) == ("57P01", False)


def test_a_backend_terminated_before_the_commit(db: psycopg.Connection[Any], database: str) -> None:
    """Found while the verdict is carried out: not in doubt, as COMMIT was not sent."""
    send(db, 1)
    with TxChild("book", database) as child:
        seq, claimed = child.claim()
        child.expect(Kind.COMMIT_REQUEST, seq)
        db.execute("select pg_terminate_backend(%s, 5000)", (claimed["backend_pid"],))
        frame = child.answer(seq, ACK)
        assert (frame.kind, frame.meta["in_doubt"]) == (Kind.TX_ENDED, False)
        assert (count(db, "bookings"), count(db, "pgmq.q_orders")) == (0, 1)


def test_the_time_limit_bounds_sql_and_idleness(db: psycopg.Connection[Any], database: str) -> None:
    """statement_timeout and the idle limit come from the permit, in this transaction only."""
    settings = "('statement_timeout', 'idle_in_transaction_session_timeout', 'client_connection_check_interval')"
    query = f"select array_agg(setting order by name) from pg_settings where name in {settings}"
    send(db, f'result = message.dead_letter(str(tx.execute("{query}").fetchone()[0]))')
    with TxChild("execute", database) as child:
        seq, outcome = child.ask(time_limit_ms=1234)
        assert outcome["reason"] == "['500', '2234', '2234']"  # a second later than the parent's own clock
        child.answer(seq, REFUSE)
        seq, outcome = child.ask()
        assert outcome["reason"] == "['500', '0', '0']"
        child.answer(seq, REFUSE)
        db.execute("update pgmq.q_orders set message = to_jsonb('tx.execute(''select pg_sleep(20)'')'::text)")
        seq, outcome = child.ask(time_limit_ms=50)
        assert outcome["sqlstate"] == "57014"
        child.answer(seq, REFUSE)
        db.execute("update pgmq.q_orders set message = to_jsonb('time.sleep(1.5)'::text)")
        assert child.ended(time_limit_ms=50)["sqlstate"] == "25P03"


def test_a_claim_planned_for_an_empty_queue_goes_by_the_index(db: psycopg.Connection[Any], database: str) -> None:
    """And the handler's own statements are planned as the session says."""
    db.execute("vacuum analyze pgmq.q_orders")
    with TxChild("execute", database) as child:
        for _ in range(8):  # after five the server may keep a plan for all parameters
            child.expect(Kind.TX_EMPTY, child.permit())
        send(
            db,
            "result = message.dead_letter(repr([tx.execute(each).fetchall() for each in "
            "('show enable_seqscan', 'explain execute pgmq_supervisor_claim(1, null)',"
            " 'explain execute pgmq_supervisor_body')]))",
        )
        seq, outcome = child.ask()
        assert "[('on',)]" in outcome["reason"]
        assert "Index Scan using q_orders_vt_idx" in outcome["reason"]
        assert "Seq Scan" not in outcome["reason"]
        child.answer(seq, REFUSE)


def test_a_database_that_cannot_be_reached(database: str) -> None:
    """TX_ENDED without a claim, again and again, and the child stays."""
    with TxChild("book", with_dbname(database, "no_such_database")) as child:
        for _ in range(2):
            seq = child.permit()
            ended = child.expect(Kind.TX_ENDED, seq).meta
            assert (ended["claimed"], ended["in_doubt"]) == (False, False)
            assert "no_such_database" in ended["error"]["message"]


def test_a_missing_queue_is_told(database: str) -> None:
    """The claim's own error, with its code."""
    with TxChild("book", database) as child:
        seq = child.permit()
        ended = child.expect(Kind.TX_ENDED, seq).meta
        assert (ended["claimed"], ended["sqlstate"]) == (False, "42P01")


def test_a_killed_child_leaves_the_message_free_at_once(db: psycopg.Connection[Any], database: str) -> None:
    """SIGKILL inside a query: the server notices within its check interval."""
    msg_id = send(db, "tx.execute('select pg_sleep(20)')")
    with TxChild("execute", database) as child:
        child.claim()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        free = "select 1 from pgmq.q_orders where msg_id = %s for update skip locked"
        eventually(lambda: db.execute(free, (msg_id,)).fetchone(), timeout_s=5, what="the row lock's end")
        assert (count(db, "bookings"), read_ct(db, msg_id)) == (0, (0, True))


def test_an_invalid_body_is_told_and_the_message_can_be_moved(db: psycopg.Connection[Any], database: str) -> None:
    """SQL NULL in a transactional queue."""
    db.execute("insert into pgmq.q_orders (vt, message) values (now(), null)")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome["kind"] == "invalid_message"
        envelope = json.dumps({"version": 1, "reason": "invalid_message"})
        frame = child.answer(seq, {"verdict": "dead_letter", "queue": "orders_dlq", "envelope": envelope})
        assert frame.kind is Kind.COMMITTED


def test_a_forked_copy_does_not_touch_the_session(db: psycopg.Connection[Any], database: str) -> None:
    """Both return; the original commits."""
    send(db, "pid = os.fork()\nif pid:\n    os.waitpid(pid, 0)")
    with TxChild("execute", database) as child:
        seq, outcome = child.ask()
        assert outcome == {"kind": "success"}
        assert child.answer(seq, ACK).kind is Kind.COMMITTED
        assert count(db, "bookings") == 1


def test_a_transaction_pooler_may_stand_between(db: psycopg.Connection[Any], database: str) -> None:
    """Two children share one server session, message after message: nothing lives outside a transaction."""
    with (
        transaction_pooler(database, server_sessions=1) as dsn,
        TxChild("book", dsn) as one,
        TxChild("execute", dsn) as two,
    ):
        for _ in range(4):
            send(db, "tx.send('audit', 1)")
            seq, _ = two.ask()
            assert two.answer(seq, ACK).kind is Kind.COMMITTED
            send(db, "x")
            seq, _ = one.ask()
            assert one.answer(seq, ACK).kind is Kind.COMMITTED
        assert (count(db, "bookings"), count(db, "pgmq.q_audit")) == (8, 4)
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as neighbour:  # the same server session
            assert count(neighbour, "pg_prepared_statements") == 0
            left = "select name from pg_settings where source = 'session' and name <> 'client_encoding'"
            known = {"application_name", "DateStyle", "TimeZone", "standard_conforming_strings", "IntervalStyle"}
            assert {name for (name,) in neighbour.execute(left)} <= known  # the pooler's own care

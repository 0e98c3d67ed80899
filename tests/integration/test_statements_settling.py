"""Leases and settlements: guards, absolute values, ended fences, dead letters that lose nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from shared.naming import notify_channel
from shared.pgmq.records import Fence
from shared.pgmq.statements import queues, settling
from supervisor.database.arrays import fences
from tests.support.rows import DEAD, QUEUE, Rows, accounts
from tests.support.waiting import eventually

ENVELOPE = json.dumps({"version": 1, "reason": "failed", "source": {"queue": QUEUE, "msg_id": 1, "attempt": 1}})


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


def _stale(fence: Fence) -> list[Fence]:
    return [
        fence._replace(read_at_us=fence.read_at_us + 1),
        fence._replace(read_ct=fence.read_ct + 1),
        fence._replace(msg_id=fence.msg_id + 1),
    ]


def test_only_the_owner_settles(rows: Rows) -> None:
    """A fence that differs in any part matches nothing."""
    rows.send(1)
    [row] = rows.claim()
    for stale in _stale(row.fence):
        assert rows.ack(stale) == rows.ack(stale, archive=True) == rows.retry(stale) == rows.release(stale) == []
        assert rows.dead_letter(stale) == []
        assert rows.renew(stale) == {}
    assert rows.ack(row.fence) == [1]
    assert rows.ack(row.fence) == []
    assert rows.count() == 0


def test_an_expired_lease_settles_nothing_but_a_release(rows: Rows) -> None:
    """Acks, retries, dead letters and renewals need vt in the future; a release only the fence."""
    msg_id = rows.send(1)
    [row] = rows.claim()
    rows.expire(msg_id)
    assert rows.ack(row.fence) == rows.ack(row.fence, archive=True) == rows.retry(row.fence) == []
    assert rows.dead_letter(row.fence) == []
    assert rows.renew(row.fence) == {}
    assert rows.release(row.fence, accounts=accounts(QUEUE, msg_id, refunds=1)) == [1]
    assert rows.headers(msg_id)["x-supervisor"]["refunds"] == 1


@pytest.mark.parametrize("statement", [settling.ack_delete, settling.ack_archive, settling.retry, settling.release])
def test_a_row_that_was_claimed_between_the_look_and_the_lock_is_not_ours(
    rows: Rows, database: str, statement: Callable[[str], bytes]
) -> None:
    """The guard is asked again of the row as it is when the lock is had."""
    kept = rows.send(1)
    lost = rows.send(2)
    fences_of = {row.fence.msg_id: row.fence for row in rows.claim()}
    slow = statement(QUEUE).replace(b" from unnest(", b" from (select pg_sleep(1)) as nap, unnest(", 1)
    assert slow != statement(QUEUE)
    wanted = {"delays": "{0,0}", "accounts": [None, None], **fences([fences_of[lost], fences_of[kept]])}
    with ThreadPoolExecutor() as pool, psycopg.connect(database, autocommit=True) as other:
        settled = pool.submit(rows.run, slow, **wanted)
        look = "select wait_event = 'PgSleep' from pg_stat_activity where pid = %s"
        pid = rows.connection.info.backend_pid
        eventually(lambda: other.execute(look, (pid,)).fetchone() == (True,))
        other.execute(f"update pgmq.q_{QUEUE} set read_ct = 2, last_read_at = now() where msg_id = %s", (lost,))
        assert [n for (n,) in settled.result() if n is not None] == [2]
    assert rows.ask(f"select read_ct from pgmq.q_{QUEUE} where msg_id = %s", lost) == 2


def test_archive_moves_the_row(rows: Rows) -> None:
    """The archive has what the queue had; a number that it knows already does not block the acknowledgement."""
    for _ in range(2):
        msg_id = rows.send({"a": 1}, {"h": 1})
        [row] = rows.claim()
        assert rows.ack(row.fence, archive=True) == [1]
        assert rows.ask(f"select message from pgmq.a_{QUEUE} where msg_id = %s", msg_id) == {"a": 1}
    rows.connection.execute(f"alter table pgmq.q_{QUEUE} alter column msg_id restart with 1")
    rows.send({"b": 2})
    [row] = rows.claim()
    assert rows.ack(row.fence, archive=True) == [1]
    assert rows.count() == 0
    assert rows.ask(f"select message from pgmq.a_{QUEUE} where msg_id = 1") == {"a": 1}


def test_a_repeated_retry_matches_nothing(rows: Rows) -> None:
    """Deaths are counted once, and a late renewal does not pull the message back."""
    msg_id = rows.send(1)
    [row] = rows.claim()
    entry = accounts(QUEUE, msg_id, deaths=1)
    assert rows.retry(row.fence, delay_s=0, accounts=entry) == [1]
    assert rows.retry(row.fence, delay_s=100, accounts=accounts(QUEUE, msg_id, deaths=2)) == []
    assert rows.renew(row.fence) == {}
    assert rows.release(row.fence) == []
    [again] = rows.claim()
    assert again.fence.read_ct == 2
    assert again.accounts is not None
    assert json.loads(again.accounts)["deaths"] == 1


def test_a_fence_ends_even_when_the_clock_went_back(rows: Rows) -> None:
    """last_read_at grows by a microsecond where the database's clock is behind it."""
    rows.send(1)
    [row] = rows.claim()
    ahead = rows.ask(
        f"update pgmq.q_{QUEUE} set last_read_at = last_read_at + interval '1 day'"
        " returning (extract(epoch from last_read_at) * 1000000)::bigint"
    )
    fence = row.fence._replace(read_at_us=ahead)
    assert rows.retry(fence, delay_s=60) == [1]
    assert rows.retry(fence, delay_s=60) == []
    assert rows.ask(f"select (extract(epoch from last_read_at) * 1000000)::bigint from pgmq.q_{QUEUE}") == ahead + 1


def test_a_retry_sets_the_delay_by_the_databases_clock(rows: Rows) -> None:
    """Up to the longest delay that can be asked for."""
    rows.send(1)
    [row] = rows.claim()
    longest_s = 9_007_199_254.740
    assert rows.retry(row.fence, delay_s=longest_s) == [1]
    assert rows.ask(f"select extract(epoch from vt - last_read_at)::float8 from pgmq.q_{QUEUE}") == pytest.approx(
        longest_s, abs=1
    )


@pytest.mark.parametrize(
    "original",
    [None, [1, [2]], "text", 7, False, {}, {"k": "v"}, {"k": 1, "x-supervisor": {"queue": "other", "refunds": 9}}],
)
def test_headers_come_back_as_they_were(rows: Rows, original: Any) -> None:
    """Accounts replace the whole entry; what was no object is kept inside it, over any number of settlements."""
    msg_id = rows.send({"b": 1}, original)
    plain = {k: v for k, v in original.items() if k != "x-supervisor"} if isinstance(original, dict) else original
    for refunds in (1, 2, 3):
        [row] = rows.claim()
        settle = rows.release if refunds == 2 else rows.retry
        assert settle(row.fence, accounts=accounts(QUEUE, msg_id, refunds=refunds)) == [1]
        stored = rows.headers(msg_id)
        entry = dict(stored.pop("x-supervisor"))
        entry.pop("headers", None)
        assert entry == {"queue": QUEUE, "msg_id": msg_id, "refunds": refunds}
        assert stored == (plain if isinstance(original, dict) else {})
    [row] = rows.claim()
    assert rows.retry(row.fence) == [1]  # no accounts: headers stay
    [row] = rows.claim()
    assert rows.dead_letter(row.fence, envelope=ENVELOPE) == [1]
    letter = rows.ask(f"select message from pgmq.q_{DEAD}")
    assert letter["headers"] == plain
    assert rows.run(queues.dlq_redrive(DEAD), source=QUEUE, ids="{1}")
    assert rows.ask(f"select headers from pgmq.q_{QUEUE}") == plain


def test_an_entry_of_another_message_is_not_unwrapped(rows: Rows) -> None:
    """Forwarded headers pass nothing on: only an entry of this queue and message can hold wrapped headers."""
    forged = {"x-supervisor": {"queue": QUEUE, "msg_id": 999, "headers": ["forged"]}}
    rows.send(1, forged)
    [row] = rows.claim()
    rows.dead_letter(row.fence, envelope=ENVELOPE)
    assert rows.ask(f"select message -> 'headers' from pgmq.q_{DEAD}") == {}


def test_a_release_notifies(rows: Rows, database: str) -> None:
    """An update fires no trigger, so that the statement tells the queue's channel itself."""
    rows.send(1)
    [row] = rows.claim()
    with psycopg.connect(database, autocommit=True) as other:
        other.execute(f'listen "{notify_channel(QUEUE)}"')
        assert rows.release(row.fence) == [1]
        assert [n.channel for n in other.notifies(timeout=10, stop_after=1)] == [notify_channel(QUEUE)]
        assert rows.release(row.fence) == []
        rows.connection.execute(f"notify \"{notify_channel(QUEUE)}\", 'end'")
        assert [n.payload for n in other.notifies(timeout=10, stop_after=1)] == ["end"]
    assert rows.claim()


def test_renewal_has_three_answers(rows: Rows, database: str) -> None:
    """Done with the new lease, busy where the row is locked by another, lost otherwise; nobody waits."""
    ids = [rows.send(n) for n in range(4)]
    fences_ = [row.fence for row in rows.claim(lease_s=5)]
    rows.expire(ids[2])
    rows.ack(fences_[3])
    with psycopg.connect(database) as other:
        other.execute(f"select from pgmq.q_{QUEUE} where msg_id = %s for update", [ids[1]])
        answers = rows.renew(*fences_, lease_s=60)
    assert answers == {1: pytest.approx(60, abs=1), 2: -1}
    assert rows.renew(fences_[1], lease_s=60) == {1: pytest.approx(60, abs=1)}


def test_locked_rows_delay_no_settlement(rows: Rows, database: str) -> None:
    """A locked row is skipped and can be told from one that is gone."""
    ids = [rows.send(n) for n in range(3)]
    owned = [row.fence for row in rows.claim()]
    with psycopg.connect(database) as other:
        other.execute(f"select from pgmq.q_{QUEUE} where msg_id = %s for update", [ids[0]])
        assert rows.ack(*owned[:2]) == [2]
        still = rows.run(settling.still_ours(QUEUE), needs_lease=True, **fences(owned[:2]))
        assert still == [(1,)]
    rows.expire(ids[0])
    assert rows.run(settling.still_ours(QUEUE), needs_lease=True, **fences(owned[:1])) == []
    assert rows.run(settling.still_ours(QUEUE), needs_lease=False, **fences(owned[:1])) == [(1,)]


def test_dead_letter_document(rows: Rows) -> None:
    """Envelope, message, headers and times in one document; the source is gone in the same transaction."""
    msg_id = rows.send({"order": 7}, {"trace": "t"})
    [row] = rows.claim()
    envelope = {"version": 1, "reason": "died", "source": {"queue": QUEUE, "msg_id": msg_id}, "error": None}
    assert rows.dead_letter(row.fence, envelope=json.dumps(envelope)) == [1]
    assert rows.count() == 0
    letter = rows.ask(f"select message from pgmq.q_{DEAD}")
    enqueued_at = letter["source"].pop("enqueued_at")
    dead_lettered_at = letter.pop("dead_lettered_at")
    assert letter == {**envelope, "message": {"order": 7}, "headers": {"trace": "t"}}
    assert enqueued_at.endswith("+00:00")
    assert enqueued_at < dead_lettered_at
    assert rows.ask(f"select headers is null from pgmq.q_{DEAD}")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(None, id="sql-null"),
        pytest.param("DEEP", id="16000-arrays"),
        pytest.param("1e400", id="1e400"),
        pytest.param('{"a": [1e131071, -1.5e-1000]}', id="wide-numbers"),
        pytest.param("-" + "9" * 400, id="400-digits"),
        pytest.param(str(2**63), id="2^63"),
        pytest.param('"\\u0001\\u001f \\ud83d\\ude00 \\ufffe ❤ \\\\ \\""', id="odd-text"),
        pytest.param("null", id="json-null"),
    ],
)
def test_bodies_survive_dead_letter_and_redrive(rows: Rows, body: str | None) -> None:
    """Whatever PostgreSQL took as a message comes back the same; SQL NULL becomes JSON null."""
    msg_id = rows.send_text(rows.deep if body == "DEEP" else body, rows.deep)
    before = rows.ask(f"select message from pgmq.q_{QUEUE}") if body is None else None
    digest = "select md5(coalesce(message, 'null'::jsonb)::text || headers::text) from pgmq.q_" + QUEUE
    told = rows.ask(digest)
    [row] = rows.claim()
    rows.retry(row.fence, accounts=accounts(QUEUE, msg_id, deaths=1))
    [row] = rows.claim()
    assert rows.dead_letter(row.fence, envelope=ENVELOPE) == [1]
    [(letter, new_id)] = rows.run(queues.dlq_redrive(DEAD), source=QUEUE, ids="{1}")
    assert (letter, rows.count(DEAD)) == (1, 0)
    assert new_id > msg_id
    assert before is None
    assert rows.ask(digest) == told
    [row] = rows.claim()
    assert row.accounts is None
    assert row.fence.read_ct == 1


def test_a_body_of_50_mb_survives(rows: Rows) -> None:
    """The move happens inside the database: size does not matter to the parent."""
    rows.connection.execute(
        f"insert into pgmq.q_{QUEUE} (vt, message)"
        " select now(), to_jsonb(string_agg(md5(n::text), '')) from generate_series(1, 1600000) n"
    )
    told = rows.ask(f"select md5(message::text) from pgmq.q_{QUEUE}")
    [row] = rows.claim()
    assert rows.dead_letter(row.fence, envelope=ENVELOPE) == [1]
    assert rows.run(queues.dlq_redrive(DEAD), source=QUEUE, ids="{1}")
    assert rows.ask(f"select md5(message::text) from pgmq.q_{QUEUE}") == told


def test_a_missing_destination_changes_nothing(rows: Rows) -> None:
    """Sent and deleted in one transaction: the source stays where the destination is not."""
    rows.send(1)
    [row] = rows.claim()
    with pytest.raises(psycopg.errors.UndefinedTable):
        rows.dead_letter(row.fence, target="nowhere")
    assert rows.count() == 1
    assert rows.dead_letter(row.fence, envelope=ENVELOPE) == [1]


def test_infinite_times_reach_the_dead_letter(rows: Rows) -> None:
    """A source that was enqueued at infinity can be moved all the same."""
    rows.send(1)
    rows.connection.execute(f"update pgmq.q_{QUEUE} set enqueued_at = 'infinity'")
    [row] = rows.claim()
    assert rows.dead_letter(row.fence, envelope=ENVELOPE) == [1]
    assert rows.ask(f"select message -> 'source' ->> 'enqueued_at' from pgmq.q_{DEAD}") == "infinity"


def test_an_infinite_read_time_breaks_no_batch(rows: Rows) -> None:
    """A row that somebody spoilt is not ours any more; the others are settled."""
    first = rows.send(1)
    rows.send(2)
    owned = [row.fence for row in rows.claim()]
    rows.connection.execute(f"update pgmq.q_{QUEUE} set last_read_at = 'infinity' where msg_id = %s", [first])
    assert rows.ack(*owned) == [2]

"""Claims: order, fences, leases, budgets, and what no message may break."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import psycopg
import pytest

from shared.pgmq.statements import claiming
from supervisor.database.arrays import fences
from tests.support.rows import QUEUE, Rows, accounts


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


def test_claim_has_the_effects_of_a_read(rows: Rows) -> None:
    """read_ct + 1, last_read_at and vt set; the fence is what the table says, to the microsecond."""
    msg_id = rows.send({"n": 1}, {"k": "v"})
    [claimed] = rows.claim(lease_s=12.5)
    table = rows.connection.execute(
        f"select msg_id, read_ct, (extract(epoch from last_read_at) * 1000000)::bigint,"
        f" extract(epoch from vt - last_read_at)::float8 from pgmq.q_{QUEUE}"
    ).fetchone()
    assert table is not None
    assert claimed.fence == table[:3] == (msg_id, 1, claimed.fence.read_at_us)
    assert table[3] == pytest.approx(12.5, abs=0.01)
    assert 12.0 < claimed.lease_s <= 12.5
    assert (claimed.body, claimed.headers, claimed.accounts) == (b'{"n": 1}', b'{"k": "v"}', None)
    assert claimed.body_loaded
    assert claimed.body_bytes == 8
    assert claimed.enqueued_us <= claimed.visible_us <= claimed.fence.read_at_us
    assert rows.claim() == []


def test_claim_goes_by_visibility_then_number(rows: Rows) -> None:
    """What became visible first comes first, not what was sent first."""
    late = rows.send("late")
    early = rows.send("early")
    rows.connection.execute(
        f"update pgmq.q_{QUEUE} set vt = now() - make_interval(secs => 100 - msg_id) where msg_id = any(%s)",
        [[late, early]],
    )
    same = [rows.send(n) for n in range(5)]
    rows.connection.execute(f"update pgmq.q_{QUEUE} set vt = now() where msg_id = any(%s)", [same])
    rows.connection.execute(f"update pgmq.q_{QUEUE} set vt = now() - interval '1 hour' where msg_id = %s", [early])
    assert [row.fence.msg_id for row in rows.claim()] == [early, late, *same]


def test_locked_rows_are_skipped(rows: Rows, database: str) -> None:
    """A row in somebody else's hands delays no claim."""
    first, second = rows.send(1), rows.send(2)
    with psycopg.connect(database) as other:
        other.execute(f"select from pgmq.q_{QUEUE} where msg_id = %s for update", [first])
        assert [row.fence.msg_id for row in rows.claim()] == [second]


def test_hostile_headers_and_bodies_do_not_raise(rows: Rows) -> None:
    """Lists, scalars, forged entries, infinities, SQL NULL, depth and digits come out as they went in."""
    deep = rows.deep
    headers = ["[1, 2]", '"text"', "7", "null", None, '{"x-supervisor": 3}', '{"x-supervisor": [1]}', deep]
    headers += ['{"x-supervisor": {"refunds": "many", "headers": ' + deep + "}}", '{"a": 1e400}']
    bodies = [
        None,
        deep,
        "1e400",
        "9" * 400,
        str(2**63 - 1),
        '"\\u0001 \\ud83d\\ude00 ❤"',
        "{}",
        '{"a": [null]}',
        "0",
        "1",
    ]
    for body, header in zip(bodies, headers, strict=True):
        rows.send_text(body, header)
    claimed = rows.claim()
    assert len(claimed) == len(bodies)
    assert [row.body for row in claimed[:4]] == [None, deep.encode(), b"1" + b"0" * 400, b"9" * 400]
    assert claimed[0].body_loaded
    assert [row.accounts for row in claimed] == [None] * 8 + ['{"refunds": "many"}', None]
    assert [row.headers for row in claimed[:5]] == [b"[1, 2]", b'"text"', b"7", b"null", None]


def test_a_forged_entry_that_is_huge_counts_as_none(rows: Rows) -> None:
    """What is larger than ours could be does not come along as an entry."""
    rows.send(1, {"x-supervisor": {"refunds": ["x" * 100] * 1000}})
    [row] = rows.claim()
    assert row.accounts is None
    assert row.headers is not None
    assert len(row.headers) > 100_000


def test_infinite_times_do_not_break(rows: Rows) -> None:
    """A row parked at infinity stays parked; one that was always visible is claimed."""
    parked, ancient = rows.send("parked"), rows.send("ancient")
    rows.connection.execute(
        f"update pgmq.q_{QUEUE} set vt = 'infinity', enqueued_at = '-infinity' where msg_id = %s", [parked]
    )
    rows.connection.execute(
        f"update pgmq.q_{QUEUE} set vt = '-infinity', enqueued_at = 'infinity' where msg_id = %s", [ancient]
    )
    [row] = rows.claim()
    assert (row.fence.msg_id, row.visible_us, row.enqueued_us) == (ancient, 0, 0)
    assert rows.run(claiming.next_visible(QUEUE), since_us=None) == [(pytest.approx(30, abs=1),)]
    rows.ack(row.fence)
    assert rows.run(claiming.next_visible(QUEUE), since_us=None) == []


def test_read_count_at_its_limit_does_not_break(rows: Rows) -> None:
    """The counter stands still instead of overflowing."""
    rows.connection.execute(f"insert into pgmq.q_{QUEUE} (vt, read_ct, message) values (now(), 2147483647, '1')")
    [row] = rows.claim()
    assert row.fence.read_ct == 2147483647
    assert rows.ack(row.fence) == [1]


def test_entry_comes_without_wrapped_headers(rows: Rows) -> None:
    """The core reads accounts; what was wrapped into the entry is not its business."""
    msg_id = rows.send(1, ["a", "list"])
    [row] = rows.claim()
    rows.retry(row.fence, accounts=accounts(QUEUE, msg_id, refunds=2))
    [row] = rows.claim()
    assert row.accounts is not None
    assert json.loads(row.accounts) == {"queue": QUEUE, "msg_id": msg_id, "refunds": 2}


def test_bodies_come_up_to_the_budget(rows: Rows) -> None:
    """The running sum decides; what does not fit comes with its length and is fetched by its fence."""
    for letter in "abcd":
        rows.send(letter * 998)
    claimed = rows.claim(budget=2500)
    assert [row.body_loaded for row in claimed] == [True, True, False, False]
    assert [row.body_bytes for row in claimed] == [1000] * 4
    fence = claimed[2].fence
    fetch = {"msg_id": fence.msg_id, "read_ct": fence.read_ct, "read_us": fence.read_at_us}
    assert rows.run(claiming.fetch_body(QUEUE), **fetch) == [(b'"' + b"c" * 998 + b'"',)]
    assert rows.run(claiming.fetch_body(QUEUE), **{**fetch, "read_us": fence.read_at_us + 1}) == []


def test_large_bodies_stay_behind(rows: Rows) -> None:
    """50 MB do not come with the claim, whatever the budget; the guess is not below the truth."""
    rows.connection.execute(
        f"insert into pgmq.q_{QUEUE} (vt, message) select now(), to_jsonb(repeat('0123456789', 5000000))"
    )
    noise = json.dumps("".join(chr(0x4E00 + (n * 7919) % 20000) for n in range(50_000)))
    rows.send_text(noise)
    first, second = rows.claim(budget=1 << 30)
    assert not first.body_loaded
    assert not second.body_loaded
    assert second.body_bytes >= len(json.loads(noise).encode())
    fetch = dict(zip(("msg_id", "read_ct", "read_us"), first.fence, strict=True))
    [(body,)] = rows.run(claiming.fetch_body(QUEUE), **fetch)
    assert len(body) > 50_000_000


def test_huge_headers_end_a_claim_early(rows: Rows) -> None:
    """100 x 10 MB of headers do not meet in one result; the first message comes in any case."""
    for _ in range(4):
        rows.connection.execute(
            f"insert into pgmq.q_{QUEUE} (vt, message, headers)"
            " select now(), '1', jsonb_build_object('h', string_agg(md5(n::text), ''))"
            " from generate_series(1, 312500) n"
        )
    assert [len(rows.claim()) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_claims_are_flushed_whatever_the_session_says(rows: Rows) -> None:
    """A claim that a crash could take back would have two owners with one read_ct."""
    rows.send(1)
    rows.connection.execute("set synchronous_commit = off")
    with rows.connection.transaction():
        rows.claim()
        assert rows.ask("show synchronous_commit") == "on"
    assert rows.ask("show synchronous_commit") == "off"


def test_next_visible_goes_on_where_the_claim_ended(rows: Rows) -> None:
    """A message that became visible between both statements is due, not overlooked."""
    rows.send(1, delay_s=1000)
    [empty] = rows.run(claiming.claim(QUEUE), limit=1, lease_ms=1, budget=1, body_limit=1, headers_limit=1)
    rows.send(2)
    assert rows.run(claiming.next_visible(QUEUE), since_us=empty[-1]) == [(0.0,)]
    rows.claim()
    assert rows.run(claiming.next_visible(QUEUE), since_us=None)[0][0] == pytest.approx(30, abs=1)


def test_delayed_rows_do_not_slow_a_claim(rows: Rows) -> None:
    """Claim and look ahead go along the index on vt: their cost does not depend on 200 000 rows that wait."""
    rows.connection.execute(
        f"insert into pgmq.q_{QUEUE} (vt, message)"
        " select now() + interval '1 hour' * n, '1' from generate_series(1, 200000) n"
    )
    rows.connection.execute(
        f"insert into pgmq.q_{QUEUE} (vt, message) select now(), '2' from generate_series(1, 100) n"
    )
    parameters = {"limit": 100, "lease_ms": 30000, "budget": 1 << 20, "body_limit": 65536, "headers_limit": 2**31 - 1}
    for analyzed in (False, True):
        if analyzed:
            rows.connection.execute(f"analyze pgmq.q_{QUEUE}")
        plan = _plan(rows, claiming.claim(QUEUE), **parameters)
        assert f"Index Scan using q_{QUEUE}_vt_idx" in plan
        assert "Seq Scan" not in plan
        plan = _plan(rows, claiming.next_visible(QUEUE), since_us=None)
        assert f"q_{QUEUE}_vt_idx" in plan
    begun = time.perf_counter()
    assert len(rows.claim()) == 100
    assert rows.claim() == []
    assert time.perf_counter() - begun < 1.0


def _plan(rows: Rows, statement: bytes, **parameters: object) -> str:
    return "\n".join(line for (line,) in rows.connection.execute(b"explain " + statement, parameters).fetchall())


def test_fences_are_exact_over_centuries(rows: Rows) -> None:
    """Microseconds survive the way through a parameter, whatever the time."""
    rows.send(1)
    for moment in ("2026-11-30 08:47:51.016711+00", "1999-12-31 23:59:59.999999+00", "2254-06-01 00:00:00.000001+00"):
        micros = rows.ask(
            f"update pgmq.q_{QUEUE} set last_read_at = %s, vt = 'infinity', read_ct = 3"
            " returning (extract(epoch from last_read_at) * 1000000)::bigint",
            moment,
        )
        fence = (1, 3, micros)
        assert rows.ask(f"select read_ct from pgmq.q_{QUEUE}") == 3
        assert rows.run(claiming.fetch_body(QUEUE), msg_id=1, read_ct=3, read_us=micros) == [(b"1",)]
        assert rows.run(claiming.fetch_body(QUEUE), msg_id=1, read_ct=3, read_us=micros - 1) == []
        assert fences([fence])["ats"] == f"{{{micros}}}"  # type: ignore[list-item]

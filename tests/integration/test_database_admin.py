"""Administration: init, queues, sending, dead letters; on the real server, with errors that say what to do."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from shared.errors import DatabaseError, OperationTimeout, SupervisorError, ValidationError
from supervisor.database.admin import Admin, WantedQueue
from supervisor.database.failures import is_of_the_message
from supervisor.embedded.pgmq_install import Installed
from tests.support.rows import DEAD, QUEUE, Rows

ENVELOPE = '{"version": 1, "reason": "%s", "source": {"queue": "%s", "msg_id": %d, "attempt": 2, "deaths": 1}}'


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    """Give a connection to a fresh database with PGMQ."""
    with psycopg.connect(database, autocommit=True) as found:
        yield found


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in it."""
    with Rows(database) as found:
        yield found


def _bury(rows: Rows, *bodies: Any, headers: Any = None, reason: str = "failed", source: str = QUEUE) -> None:
    for body in bodies:
        rows.send(body, headers)
    for row in rows.claim():
        assert rows.dead_letter(row.fence, envelope=ENVELOPE % (reason, source, row.fence.msg_id))


def test_init_makes_everything_once(bare_database: str) -> None:
    """PGMQ, our schema, queues, dead-letter queues, notifications; a second time nothing changes."""
    wanted = [
        WantedQueue(name=QUEUE, dead_letter_queue=DEAD),
        WantedQueue(name="u", dead_letter_queue="u_dlq", storage="unlogged"),
    ]
    with psycopg.connect(bare_database, autocommit=True) as connection:
        report = Admin(connection).initialise(wanted)
        assert (report.pgmq, report.schema_created) == (Installed.SQL, True)
        assert report.created == (QUEUE, DEAD, "u", "u_dlq")
        assert report.notify_failed == ()
        again = Admin(connection).initialise(wanted)
        assert (again.pgmq, again.schema_created, again.created) == (Installed.ALREADY, False, ())
        assert [(q.name, q.storage) for q in Admin(connection).list_queues()] == [
            ("u", "unlogged"),
            ("u_dlq", "durable"),
            (QUEUE, "durable"),
            (DEAD, "durable"),
        ]
        rows = connection.execute("select queue_name from pgmq.notify_insert_throttle order by 1").fetchall()
        assert rows == [("u",), (QUEUE,)]


def test_twenty_inits_at_once(bare_database: str) -> None:
    """All of them succeed; each thing is made by one."""
    wanted = [WantedQueue(name=QUEUE, dead_letter_queue=DEAD)]

    def init(_: int) -> tuple[str, ...]:
        with psycopg.connect(bare_database, autocommit=True) as connection:
            report = Admin(connection).initialise(wanted)
            assert report.notify_failed == ()
            return report.created

    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        assert all(set(created) <= {QUEUE, DEAD} for created in threads.map(init, range(20)))


def test_prepare_makes_only_what_may_be_made(connection: psycopg.Connection[Any]) -> None:
    """Without create a missing queue is refused, with the command that makes it."""
    with pytest.raises(DatabaseError, match="queues create work"):
        Admin(connection).prepare([WantedQueue(name=QUEUE, dead_letter_queue=DEAD, create=False)])
    report = Admin(connection).prepare([WantedQueue(name=QUEUE, dead_letter_queue=DEAD)])
    assert report.created == (QUEUE, DEAD)


def test_without_pgmq_everything_says_init(bare_database: str) -> None:
    """The remedy is one command."""
    with psycopg.connect(bare_database, autocommit=True) as connection:
        for ask in (Admin(connection).list_queues, lambda: Admin(connection).require_queue(QUEUE)):
            with pytest.raises(DatabaseError, match="init"):
                ask()


def test_names_are_checked_before_anything_else(connection: psycopg.Connection[Any]) -> None:
    """Upper case, quotes, blanks and long names are refused with the reason."""
    for name in ("Work", "a-b", "a b", "q'", "ä", "x" * 48, ""):
        with pytest.raises(ValidationError):
            Admin(connection).create_queue(name)
    with pytest.raises(ValidationError, match="storage"):
        Admin(connection).create_queue("ok", "paper")


def test_list_counts_each_kind(rows: Rows, database: str) -> None:
    """Visible, in flight, delayed, archived, and the age of the oldest visible message."""
    for n in range(4):
        rows.send(n)
    claimed = rows.claim(2)
    rows.ack(claimed[0].fence, archive=True)
    rows.send("later", delay_s=100)
    rows.send("old", delay_s=-50)
    with psycopg.connect(database, autocommit=True) as connection:
        info = Admin(connection).list_queues()[0]
    assert (info.name, info.visible, info.in_flight, info.delayed, info.archived) == (QUEUE, 3, 1, 1, 1)
    assert info.oldest_visible_s == pytest.approx(50, abs=5)


def test_drop_has_a_lock_timeout(rows: Rows, connection: psycopg.Connection[Any], database: str) -> None:
    """A queue in use is not waited for for ever; afterwards it can be dropped; a missing one is said to be missing."""
    with psycopg.connect(database) as other:
        other.execute(f"select count(*) from pgmq.q_{QUEUE}")
        with pytest.raises(OperationTimeout, match="in use"):
            Admin(connection).drop_queue(QUEUE, lock_timeout_s=0.1)
    Admin(connection).drop_queue(QUEUE)
    with pytest.raises(DatabaseError, match="does not exist"):
        Admin(connection).drop_queue(QUEUE)


def test_purge_skips_what_is_in_flight(rows: Rows, connection: psycopg.Connection[Any], database: str) -> None:
    """Also what others have locked; delayed messages go."""
    rows.send("in flight")
    rows.claim()
    locked = rows.send("locked")
    rows.connection.execute(
        f"insert into pgmq.q_{QUEUE} (vt, message)"
        " select now() + interval '1 h' * (n %% 2), '1' from generate_series(1, %s) n",
        [2500],
    )
    heard: list[int] = []
    with psycopg.connect(database) as other:
        other.execute(f"select from pgmq.q_{QUEUE} where msg_id = %s for update", [locked])
        result = Admin(connection).purge_queue(QUEUE, heard.append)
    assert (result.deleted, result.skipped) == (2500, 2)
    assert heard == [1000, 2000, 2500]


def test_send_batch_keeps_order_and_text(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """All or none; numbers keep their digits; headers go to each; the delay is in milliseconds."""
    admin = Admin(connection)
    bodies = ["1e400", "9" * 400, rows.deep, '"text"']
    ids = admin.send_batch(QUEUE, bodies, headers='{"k": 1}')
    assert ids == sorted(ids)
    claimed = rows.claim()
    assert [row.body for row in claimed] == [b"1" + b"0" * 400, b"9" * 400, rows.deep.encode(), b'"text"']
    assert {row.headers for row in claimed} == {b'{"k": 1}'}
    with pytest.raises(SupervisorError) as refused:
        admin.send_batch(QUEUE, ["1", "{", "2"])
    assert is_of_the_message(refused.value)
    admin.send_batch(QUEUE, ["1"], delay_ms=1500)
    assert rows.ask(
        f"select extract(epoch from max(vt) - clock_timestamp())::float8 from pgmq.q_{QUEUE} where read_ct = 0"
    ) == (pytest.approx(1.5, abs=0.5))
    assert admin.send_batch(QUEUE, []) == []


def test_dead_letters_are_listed_and_shown(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """Only those of this source; the whole document as text."""
    _bury(rows, 1, 2, reason="failed")
    _bury(rows, 3, reason="died")
    _bury(rows, 4, source="other")
    for odd in ('"no envelope"', "[1]", "{}", '{"version": 1, "message": 1, "source": [1]}'):
        rows.connection.execute("select pgmq.send(%s, %s::jsonb)", [DEAD, odd])
    admin = Admin(connection)
    listed = admin.dead_letters(QUEUE, DEAD)
    assert [(row.msg_id, row.reason, row.attempt, row.deaths) for row in listed] == [
        (1, "failed", "2", "1"),
        (2, "failed", "2", "1"),
        (3, "died", "2", "1"),
    ]
    assert [row.msg_id for row in admin.dead_letters(QUEUE, DEAD, reason="died")] == [3]
    assert [row.msg_id for row in admin.dead_letters(QUEUE, DEAD, after=1, limit=1)] == [2]
    document = admin.dead_letter(DEAD, 1)
    assert document is not None
    assert '"message": 1' in document
    assert admin.dead_letter(DEAD, 99) is None


def test_redrive_starts_clean(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """Message and headers as they were sent, no entry of ours, read_ct 0; in flight and foreign ones stay."""
    _bury(rows, "a", "b", "c", headers={"k": 1, "x-supervisor": {"queue": QUEUE, "msg_id": 1, "deaths": 9}})
    _bury(rows, "foreign", source="other")
    rows.connection.execute(f"update pgmq.q_{DEAD} set vt = now() + interval '1 h' where msg_id = 2")
    heard: list[int] = []
    result = Admin(connection).redrive(QUEUE, DEAD, advanced=heard.append)
    assert ([old for old, _ in result.moved], result.skipped, result.failed) == ([1, 3], [2], [])
    assert heard == [2]
    claimed = rows.claim()
    assert [row.body for row in claimed] == [b'"a"', b'"c"']
    assert {(row.headers, row.accounts, row.fence.read_ct) for row in claimed} == {(b'{"k": 1}', None, 1)}
    asked = Admin(connection).redrive(QUEUE, DEAD, [4, 99, 4])
    assert (asked.moved, asked.skipped) == ([], [4, 99])


def test_redrive_has_a_rate(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """Batches of a quarter of a second, and waits between them."""
    _bury(rows, *range(20))
    waits: list[float] = []
    result = Admin(connection).redrive(QUEUE, DEAD, rate=20, sleep=waits.append)
    assert len(result.moved) == 20
    assert len(waits) == 3
    assert waits == [pytest.approx(n * 0.25, abs=0.2) for n in (1, 2, 3)]
    with pytest.raises(ValidationError):
        Admin(connection).redrive(QUEUE, DEAD, rate=0)


def test_redrive_without_its_source_changes_nothing(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """The dead letters stay where they are."""
    _bury(rows, 1)
    rows.connection.execute("select pgmq.drop_queue(%s)", [QUEUE])
    with pytest.raises(DatabaseError, match="queues create work"):
        Admin(connection).redrive(QUEUE, DEAD)
    assert rows.count(DEAD) == 1


def test_redrive_only_some(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """By number, and by reason."""
    _bury(rows, 1, 2)
    _bury(rows, 3, reason="died")
    assert [old for old, _ in Admin(connection).redrive(QUEUE, DEAD, reason="died").moved] == [3]
    assert [old for old, _ in Admin(connection).redrive(QUEUE, DEAD, [2]).moved] == [2]
    assert rows.count(DEAD) == 1


def test_dead_letters_are_purged(rows: Rows, connection: psycopg.Connection[Any]) -> None:
    """By number or all; others' stay."""
    _bury(rows, 1, 2, 3)
    _bury(rows, 4, source="other")
    admin = Admin(connection)
    assert admin.purge_dead_letters(QUEUE, DEAD, [1, 4]).deleted == 1
    result = admin.purge_dead_letters(QUEUE, DEAD)
    assert (result.deleted, result.skipped) == (2, 0)
    assert rows.count(DEAD) == 1

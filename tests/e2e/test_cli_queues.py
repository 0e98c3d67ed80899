"""init, queues, send and dlq against a database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.cli import typed

CONFIG = """
[queues.orders]
handler = "nowhere:nothing"
[queues.mails]
handler = "nowhere:nothing"
dead_letter_queue = "graveyard"
storage = "unlogged"
notify = false
"""


def fetch(dsn: str, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Ask the database."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(query.encode(), parameters).fetchall()


def dead_letter(dsn: str, queue: str, body: str, *, reason: str = "failed", dlq: str | None = None) -> int:
    """Put a dead letter of `queue` where it belongs; gives its number."""
    document = {
        "version": 1,
        "reason": reason,
        "source": {"queue": queue, "msg_id": 7, "attempt": 5, "deliveries": 5, "deaths": 1, "enqueued_at": "2024"},
        "error": {"type": "ValueError", "message": "no\x1b[2J\nmore", "traceback": "..."},
        "death": {"cause": "signal"},
        "headers": {"tenant": 1, "x-supervisor": {"deaths": 3}},
    }
    query = "select pgmq.send(%s, %s::jsonb || jsonb_build_object('message', %s::text::jsonb))"
    [(msg_id,)] = fetch(dsn, query, dlq or f"{queue}_dlq", json.dumps(document), body)
    return int(msg_id)


def test_init_and_again(tmp_path: Path, bare_database: str) -> None:
    """What init makes is there, handlers are not imported, and a second init changes nothing."""
    (tmp_path / "supervisor.toml").write_text(CONFIG)
    done = typed("init", cwd=tmp_path, dsn=bare_database)
    assert done.code == 0, done.err
    queues = {
        row["queue"]: row["storage"] for row in typed("queues", "list", "--json", cwd=tmp_path, dsn=bare_database).json
    }
    assert queues == {"orders": "durable", "orders_dlq": "durable", "mails": "unlogged", "graveyard": "durable"}
    assert fetch(bare_database, "select queue_name from pgmq.notify_insert_throttle") == [("orders",)]
    assert fetch(bare_database, "select count(*) from pgmq_supervisor.paused") == [(0,)]
    again = typed("init", "--json", cwd=tmp_path, dsn=bare_database)
    assert again.code == 0
    assert not any(step["changed"] for step in again.json)


def test_without_a_file(tmp_path: Path, database: str) -> None:
    """A DSN is all that these commands need."""
    assert typed("init", cwd=tmp_path, dsn=database).code == 0
    assert typed("queues", "create", "q", cwd=tmp_path, dsn=database).out == "q: created\n"
    assert typed("queues", "create", "q", cwd=tmp_path, dsn=database).out == "q: was there already\n"
    assert typed("--dsn", database, "send", "q", "{}", cwd=tmp_path).out == "q: sent message 1\n"


def test_queues_are_counted(tmp_path: Path, database: str) -> None:
    """The list tells visible, in flight, delayed and archived messages apart, and the age of the oldest visible one."""
    fetch(database, "select pgmq.create('q'), pgmq.send('q', '1'), pgmq.send('q', '2')")
    fetch(database, "select pgmq.send('q', '3', 600), pgmq.send('q', '4')")
    fetch(database, "select pgmq.archive('q', 4::bigint), (select count(*) from pgmq.read('q', 60, 1))")
    [row] = typed("queues", "list", "--json", cwd=tmp_path, dsn=database).json
    assert (row["visible"], row["in_flight"], row["delayed"], row["archived"]) == (1, 1, 1, 1)
    assert row["oldest_visible_seconds"] >= 0
    table = typed("queues", "list", cwd=tmp_path, dsn=database).out.splitlines()
    assert table[0].split() == ["QUEUE", "VISIBLE", "IN_FLIGHT", "DELAYED", "ARCHIVED", "OLDEST_VISIBLE", "STORAGE"]
    assert table[1].split()[:5] == ["q", "1", "1", "1", "1"]


def test_purge_skips_what_is_in_flight(tmp_path: Path, database: str) -> None:
    """A purge deletes what waits, delayed or not, and leaves what somebody has."""
    fetch(database, "select pgmq.create('q'), pgmq.send('q', '1'), pgmq.send('q', '2'), pgmq.send('q', '3', 600)")
    fetch(database, "select * from pgmq.read('q', 60, 1)")
    assert typed("queues", "purge", "q", cwd=tmp_path, dsn=database).out == "q: purged 2 messages, 1 in flight left\n"
    assert fetch(database, "select msg_id from pgmq.q_q") == [(1,)]


def test_drop(tmp_path: Path, database: str) -> None:
    """Dropping removes a queue; one that is not there is an error with a remedy."""
    fetch(database, "select pgmq.create('q')")
    assert typed("queues", "drop", "q", cwd=tmp_path, dsn=database).code == 0
    done = typed("queues", "drop", "q", cwd=tmp_path, dsn=database)
    assert done.code == 1
    assert "queue q does not exist" in done.err


def test_drop_has_a_lock_timeout(tmp_path: Path, database: str) -> None:
    """A queue that somebody holds is not waited for without end."""
    fetch(database, "select pgmq.create('q'), pgmq.send('q', '1')")
    with psycopg.connect(database) as holder:
        holder.execute("select * from pgmq.q_q for update")
        done = typed("queues", "drop", "q", cwd=tmp_path, dsn=database)
    assert done.code == 1
    assert "queue q is in use" in done.err
    assert fetch(database, "select count(*) from pgmq.q_q") == [(1,)]


BODIES = [
    '{"a": 1.50}',
    "9223372036854775807",
    "1e400",
    "0.1000000000000000055511151231257827",
    '"ö\\u0001"',
    "null",
    "[" * 2000 + "]" * 2000,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:20])
def test_bodies_lose_nothing(tmp_path: Path, database: str, body: str) -> None:
    """What was typed is what PostgreSQL reads: no number loses a digit."""
    fetch(database, "select pgmq.create('q')")
    done = typed("send", "q", body, "--headers", '{"id": 123456789012345678901234567890}', cwd=tmp_path, dsn=database)
    assert done.code == 0, done.err
    query = "select message = %s::text::jsonb, headers::text from pgmq.q_q"
    assert fetch(database, query, body) == [(True, '{"id": 123456789012345678901234567890}')]


def test_delay(tmp_path: Path, database: str) -> None:
    """--delay takes seconds and duration texts, to the millisecond."""
    fetch(database, "select pgmq.create('q')")
    for delay in ("1.5", "1500ms"):
        typed("send", "q", "1", "--delay", delay, cwd=tmp_path, dsn=database)
    rows = fetch(database, "select extract(epoch from vt - enqueued_at)::float8 from pgmq.q_q")
    assert [round(seconds, 1) for (seconds,) in rows] == [1.5, 1.5]


@pytest.mark.parametrize("body", ["hello", "{", "NaN", "'x'", '"\\u0000"', '"\\ud800"', ""])
def test_what_is_no_json(tmp_path: Path, database: str, body: str) -> None:
    """A message that PostgreSQL cannot read is refused, with the remedy."""
    fetch(database, "select pgmq.create('q')")
    done = typed("send", "q", body, cwd=tmp_path, dsn=database)
    assert done.code == 2
    assert "the message is refused" in done.err
    assert fetch(database, "select count(*) from pgmq.q_q") == [(0,)]


def test_lines(tmp_path: Path, database: str) -> None:
    """'-' sends one message a line, in order, in batches."""
    fetch(database, "select pgmq.create('q')")
    text = "".join(f'{{"n": {number}}}\n' for number in range(2500))
    done = typed("send", "q", "-", cwd=tmp_path, dsn=database, stdin=text)
    assert (done.code, done.out, done.err) == (0, "q: sent 2500 messages\n", "")
    rows = fetch(database, "select (message ->> 'n')::int from pgmq.q_q order by msg_id")
    assert [number for (number,) in rows] == list(range(2500))


def test_bad_lines_are_named_and_the_others_sent(tmp_path: Path, database: str) -> None:
    """Of a batch with bad lines nothing good is lost: each bad one is named by its number, and the exit code is 1."""
    fetch(database, "select pgmq.create('q')")
    text = b'1\n\nhello\n"\\u0000"\n2\n"\xff"\n3'
    done = typed("send", "q", "--json", cwd=tmp_path, dsn=database, stdin=text)
    assert done.code == 1
    assert done.json["sent"] == 3
    assert sorted(item["line"] for item in done.json["refused"]) == [3, 4, 6]
    assert done.err.count("it was not sent") == 3
    assert fetch(database, "select message::text from pgmq.q_q order by msg_id") == [("1",), ("2",), ("3",)]


def test_send_to_no_queue(tmp_path: Path, database: str) -> None:
    """A queue that is not there is an error, and how to make it is the remedy."""
    done = typed("send", "nope", "1", cwd=tmp_path, dsn=database)
    assert done.code == 1
    assert "queues create nope" in done.err


def test_connection_lost_while_sending(tmp_path: Path, database: str) -> None:
    """When the connection goes, the lines of that statement are reported as unknown, and nothing is sent again."""
    fetch(database, "select pgmq.create('q')")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            """
            create function cut() returns trigger language plpgsql as $$ begin
                if new.message = '3' then perform pg_terminate_backend(pg_backend_pid()); end if; return new; end $$
            """
        )
        connection.execute("create trigger cut before insert on pgmq.q_q for each row execute function cut()")
    lines = "1\n2\n3\n4\n"
    done = typed("send", "q", "-", "--json", cwd=tmp_path, dsn=database, stdin=lines)
    assert done.code == 1
    assert done.json["unknown"] == {"from": 1, "to": 4}
    assert "outcome unknown for lines 1-4" in done.err
    assert "tail -n +5" in done.err
    assert fetch(database, "select count(*) from pgmq.q_q") == [(0,)]


def test_dead_letters_are_listed_and_shown(tmp_path: Path, database: str) -> None:
    """The list has a line a letter, safe for a terminal; `show` gives whole documents, digit by digit."""
    fetch(database, "select pgmq.create('q'), pgmq.create('q_dlq')")
    first = dead_letter(database, "q", '{"x": 1e400}')
    second = dead_letter(database, "q", "2", reason="hard_timeout")
    rows = typed("dlq", "list", "q", "--json", cwd=tmp_path, dsn=database).json
    assert [(row["msg_id"], row["reason"], row["cause"], row["attempt"]) for row in rows] == [
        (first, "failed", "signal", 5),
        (second, "hard_timeout", "signal", 5),
    ]
    table = typed("dlq", "list", "q", "--reason", "hard_timeout", cwd=tmp_path, dsn=database).out
    assert "ValueError: no\\x1b[2J" in table
    assert len(table.splitlines()) == 2
    shown = typed("dlq", "show", "q", str(first), cwd=tmp_path, dsn=database)
    assert "1" + "0" * 400 in shown.out
    missing = typed("dlq", "show", "q", "99", cwd=tmp_path, dsn=database)
    assert missing.code == 1
    assert "no dead letter 99" in missing.err


def test_no_dead_letters(tmp_path: Path, database: str) -> None:
    """A queue whose dead-letter queue was not needed yet has no dead letters; one that is not there is an error."""
    fetch(database, "select pgmq.create('q')")
    done = typed("dlq", "list", "q", cwd=tmp_path, dsn=database)
    assert done.code == 0
    assert "q has no dead letters" in done.err
    assert typed("dlq", "list", "nope", cwd=tmp_path, dsn=database).code == 1


def test_redrive(tmp_path: Path, database: str) -> None:
    """Some by number, or all: they go back as they were sent, without our account; what stays is named."""
    fetch(database, "select pgmq.create('q'), pgmq.create('q_dlq')")
    letters = [dead_letter(database, "q", str(number)) for number in range(4)]
    done = typed("dlq", "redrive", "q", str(letters[2]), "99", cwd=tmp_path, dsn=database)
    assert done.out == "q: redrove 1 message\n"
    assert done.code == 1
    assert "no dead letter 99" in done.err
    assert fetch(database, "select message::text, headers::text from pgmq.q_q") == [("2", '{"tenant": 1}')]
    done = typed("dlq", "redrive", "q", "--all", "--rate", "1000", "--json", cwd=tmp_path, dsn=database)
    assert (done.code, done.json["redriven"]) == (0, 3)
    assert fetch(database, "select count(*) from pgmq.q_q_dlq") == [(0,)]


def test_redrive_of_one_reason(tmp_path: Path, database: str) -> None:
    """--reason alone chooses all with that reason."""
    fetch(database, "select pgmq.create('q'), pgmq.create('q_dlq')")
    dead_letter(database, "q", "1")
    dead_letter(database, "q", "2", reason="died")
    assert typed("dlq", "redrive", "q", "--reason", "died", cwd=tmp_path, dsn=database).code == 0
    assert fetch(database, "select message::text from pgmq.q_q") == [("2",)]


def test_redrive_keeps_to_its_rate(tmp_path: Path, database: str) -> None:
    """--rate spreads the messages: their times of arrival are apart."""
    fetch(database, "select pgmq.create('q'), pgmq.create('q_dlq')")
    for number in range(4):
        dead_letter(database, "q", str(number))
    typed("dlq", "redrive", "q", "--all", "--rate", "2.5", cwd=tmp_path, dsn=database)
    [(spread_s,)] = fetch(
        database, "select extract(epoch from max(enqueued_at) - min(enqueued_at))::float8 from pgmq.q_q"
    )
    assert spread_s > 0.5


def test_purge_of_dead_letters(tmp_path: Path, database: str) -> None:
    """A purge deletes the letters of this source only, from a dead-letter queue that others share."""
    (tmp_path / "supervisor.toml").write_text(CONFIG)
    fetch(database, "select pgmq.create('graveyard'), pgmq.create('mails')")
    dead_letter(database, "mails", "1", dlq="graveyard")
    dead_letter(database, "other", "2", dlq="graveyard")
    assert typed("dlq", "purge", "mails", "--all", cwd=tmp_path, dsn=database).out == "mails: purged 1 dead letter\n"
    assert fetch(database, "select message ->> 'message' from pgmq.q_graveyard") == [("2",)]

"""A redrive by HTTP or the control socket: bounded, with an answer that tells the truth about what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor import preparing
from supervisor.actions import SupervisorActions
from supervisor.config import Config, Overrides, load
from supervisor.control.actions import ActionError, Refusal
from supervisor.preparing import Redriven, redrive_letters
from tests.support.rows import DEAD, QUEUE, Rows


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


@pytest.fixture
def config(database: str, tmp_path: Path) -> Config:
    """Give the configuration of a supervisor of that queue."""
    return load(Overrides(dsn=database, queues=(f"{QUEUE}=tasks:handle",)), environ={}, cwd=tmp_path)


def bury(rows: Rows, count: int) -> None:
    """Put dead letters of messages 1 to `count` into the dead-letter queue."""
    rows.connection.execute(
        f"insert into pgmq.q_{DEAD} (vt, message) select now(), jsonb_build_object('version', 1, 'reason', 'failed',"
        " 'source', jsonb_build_object('queue', %s::text, 'msg_id', n), 'message', n) from generate_series(1, %s) as n",
        [QUEUE, count],
    )


def seen(rows: Rows) -> list[Any]:
    """The bodies that are back in the queue."""
    return [
        row[0] for row in rows.connection.execute(f"select message from pgmq.q_{QUEUE} order by 1::text").fetchall()
    ]


def test_all_go_back_in_one_call_where_there_is_time(rows: Rows, config: Config) -> None:
    """Three batches, nothing left."""
    bury(rows, 250)
    assert redrive_letters(config, QUEUE, None, None, threading.Event()) == Redriven(250)
    assert (rows.count(), rows.count(DEAD)) == (250, 0)


def test_a_call_that_ends_early_says_so_and_the_next_ones_do_the_rest(rows: Rows, config: Config) -> None:
    """As at a stop of the supervisor: whole batches, each letter once."""
    bury(rows, 250)
    stop = threading.Event()
    stop.set()
    answers = [redrive_letters(config, QUEUE, None, None, stop) for _ in range(3)]
    assert answers == [Redriven(100, more=True), Redriven(100, more=True), Redriven(50)]
    assert sorted(map(int, seen(rows))) == list(range(1, 251))
    assert redrive_letters(config, QUEUE, None, None, stop) == Redriven(0)


def test_numbers_may_be_given_again(rows: Rows, config: Config) -> None:
    """What has gone is skipped then, not sent twice."""
    bury(rows, 150)
    stop = threading.Event()
    stop.set()
    numbers = list(range(1, 151))
    assert redrive_letters(config, QUEUE, numbers, None, stop) == Redriven(100, more=True)
    assert redrive_letters(config, QUEUE, numbers, None, threading.Event()) == Redriven(50, skipped=100)
    assert (rows.count(), rows.count(DEAD)) == (150, 0)


def test_a_slow_rate_is_not_waited_for_without_end(rows: Rows, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message an hour: the answer comes when the time of a call is over, not when all have gone."""
    monkeypatch.setattr(preparing, "REDRIVE_S", 0.5)
    bury(rows, 3)
    assert redrive_letters(config, QUEUE, None, 1 / 3600, threading.Event()) == Redriven(1, more=True)


def test_what_was_moved_before_a_failure_is_told(rows: Rows, config: Config) -> None:
    """The session ends in the third batch: two are in the answer, and the letters of the third are where they were."""
    bury(rows, 250)
    rows.connection.execute(
        "create function sever() returns trigger language plpgsql as $$ begin"
        " if new.message = '222'::jsonb then perform pg_terminate_backend(pg_backend_pid()); end if; return new; end $$"
    )
    rows.connection.execute(
        f"create trigger sever before insert on pgmq.q_{QUEUE} for each row execute function sever()"
    )
    answer = redrive_letters(config, QUEUE, None, None, threading.Event())
    assert (answer.moved, answer.more) == (200, True)
    assert answer.error
    assert (rows.count(), rows.count(DEAD)) == (200, 50)
    rows.connection.execute(f"drop trigger sever on pgmq.q_{QUEUE}")
    assert redrive_letters(config, QUEUE, None, None, threading.Event()) == Redriven(50)


def _answer(config: Config, stop: threading.Event) -> dict[str, object]:
    """What HTTP and the control socket say."""

    async def redrive(queue: str, msg_ids: Any, rate: float | None) -> Redriven:
        return await asyncio.to_thread(redrive_letters, config, queue, msg_ids, rate, stop)

    nothing: Any = None
    actions = SupervisorActions(
        core=nothing,
        post=nothing,
        telemetry=nothing,
        administration=nothing,
        redrive=redrive,
        queues=[QUEUE],
        name="here",
    )
    return dict(asyncio.run(actions.redrive(QUEUE, None, None)))


def test_the_answer_says_what_to_do(rows: Rows, config: Config) -> None:
    """In words for people, and a flag for machines."""
    bury(rows, 101)
    stop = threading.Event()
    stop.set()
    answer = _answer(config, stop)
    assert answer == {
        "queue": QUEUE, "redriven": 100, "skipped": 0, "failed": 0, "more": True, "note": "more left: call again",
    }  # fmt: skip
    answer = _answer(config, stop)
    assert (answer["redriven"], answer["more"], answer["note"]) == (1, False, None)


def test_a_redrive_that_moved_nothing_has_failed(rows: Rows, config: Config) -> None:
    """The queue is gone: a refusal with the reason, as ever."""
    bury(rows, 1)
    rows.connection.execute("select pgmq.drop_queue(%s)", [QUEUE])
    with pytest.raises(ActionError, match="does not exist") as refused:
        _answer(config, threading.Event())
    assert refused.value.refusal is Refusal.FAILED

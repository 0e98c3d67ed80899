"""The fixtures for applications, used as an application would: in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from child.message import Message as RealMessage
from child.transaction import AsyncTransaction as RealAsyncTransaction
from child.transaction import Transaction as RealTransaction
from crashtests.testing import Message
from crashtests.testing.transactions import AsyncTransaction, Outbox, Transaction

pytestmark = pytest.mark.timeout(600)

ALONE = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:asyncio")
NOWHERE: Any = None
ROOT = Path(__file__).resolve().parents[2]

TASKS = """
import asyncio
import os


class Refused(Exception):
    permanent = True


def handle(message):
    match message.body["do"]:
        case "succeed":
            message.archive()
            return message.body["do"]
        case "retry":
            return message.retry(after="30s")
        case "reject":
            raise message.dead_letter("no")
        case "refuse":
            raise Refused("no such currency")
        case "fail":
            raise ValueError("again")
        case "long":
            return message.retry(after=-1)
        case "stop":
            message.raise_if_stopped()
        case "die":
            if message.attempt == 1:
                os._exit(3)


def book(message, tx):
    tx.execute("insert into payments (id) values (%s)", [message.body["id"]])
    tx.send("invoices", {"payment": message.body["id"]})
    if message.body.get("fail"):
        raise ValueError("after the insert")


async def book_later(message, tx):
    await tx.execute("insert into payments (id) values (%s)", [message.body["id"]])
    await asyncio.sleep(0)
"""

TESTS = """
import os
import pathlib
import signal

import psycopg
import pytest

import tasks

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def tables(pgmq_database):
    with psycopg.connect(pgmq_database, autocommit=True) as connection:
        connection.execute("create table payments (id integer primary key)")
        connection.execute("select pgmq.create('invoices')")
        yield connection


@pytest.mark.parametrize(
    ("do", "kind"),
    [("succeed", "success"), ("retry", "retry"), ("reject", "dead_letter"), ("refuse", "permanent"), ("fail", "error"),
     ("long", "permanent")],
)
def test_verdicts(run_handler, do, kind):
    assert run_handler(tasks.handle, {"do": do}).kind == kind


def test_details(run_handler):
    outcome = run_handler(tasks.handle, {"do": "succeed"})
    assert (outcome.value, outcome.ack) == ("succeed", "archive")
    assert run_handler(tasks.handle, {"do": "retry"}).delay_s == 30
    assert run_handler(tasks.handle, {"do": "reject"}).reason == "no"
    assert run_handler(tasks.handle, {"do": "stop"}, stop_requested=True).kind == "stopped"
    assert run_handler(tasks.handle, raw=b"{").kind == "invalid_message"


def test_transactions(run_handler, tables):
    assert run_handler(tasks.book, {"id": 1}).committed
    assert not run_handler(tasks.book, {"id": 2, "fail": True}).committed
    assert run_handler(tasks.book_later, {"id": 3}).committed
    assert tables.execute("select array_agg(id order by id) from payments").fetchone() == ([1, 3],)
    assert tables.execute("select message from pgmq.q_invoices").fetchall() == [({"payment": 1},)]


def test_a_supervisor(pgmq_supervisor):
    jobs = pgmq_supervisor("tasks:handle", app_dir=HERE, retry={"base": "100ms"})
    jobs.send({"do": "die"})
    jobs.send({"do": "refuse"})
    jobs.wait_until_empty()
    assert jobs.acknowledged() == [{"do": "die"}]
    assert [letter["reason"] for letter in jobs.dead_letters()] == ["failed"]
    assert jobs.stop() == 0


def test_a_kill_at_a_point(pgmq_supervisor, pgmq_sync):
    trap = pgmq_sync.trap("child.result.before_send")
    jobs = pgmq_supervisor("tasks:handle", app_dir=HERE, retry={"base": "100ms"})
    jobs.send({"do": "succeed"})
    trap.wait(60).process.kill()
    jobs.wait_until_empty()
    assert jobs.acknowledged() == [{"do": "succeed"}]
    assert [c.point for c in pgmq_sync.crossings].count("child.handler.before") == 2


def test_a_killed_parent(pgmq_supervisor, pgmq_sync):
    trap = pgmq_sync.trap("parent.settle.before")
    jobs = pgmq_supervisor("tasks:handle", app_dir=HERE, visibility_timeout="2s")
    jobs.send({"do": "succeed"})
    trap.wait(60)
    jobs.kill()
    jobs.start()
    jobs.wait_until_empty()
    assert jobs.acknowledged() == [{"do": "succeed"}]
"""


def test_an_application_tests_its_handlers(tmp_path: Path) -> None:
    """Units without a process, transactions on a real connection, supervisors that are killed at sync points."""
    (tmp_path / "tasks.py").write_text(textwrap.dedent(TASKS))
    (tmp_path / "test_tasks.py").write_text(textwrap.dedent(TESTS))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *ALONE, "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "11 passed" in done.stdout


@pytest.mark.parametrize(
    ("made", "real"),
    [
        (Message(), RealMessage),
        (Transaction(NOWHERE, Outbox()), RealTransaction),
        (AsyncTransaction(NOWHERE, Outbox()), RealAsyncTransaction),
    ],
    ids=lambda found: found.__name__ if isinstance(found, type) else "",
)
def test_what_a_handler_may_use_is_what_it_may_use_in_production(made: object, real: type) -> None:
    """The made ones have every public name of the real ones; `end` is for the child."""
    ours = set(dir(made))
    assert {name for name in dir(real) if not name.startswith("_")} - ours <= {"end"}

"""run: what comes of a start, by its exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.support.service import Service
from tests.support.waiting import eventually

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path, database: str) -> Iterator[Start]:
    """Start services that do not outlive the test."""
    with ExitStack() as stack:

        def start_one(config: str, *arguments: str, tasks: str | None = None) -> Service:
            service = Service(tmp_path, database, config, tasks=tasks)
            stack.callback(service.close)
            return service.start(*arguments)

        yield start_one


GOOD = "def handle(message): ...\n"
ONE = '[queues.q]\nhandler = "tasks:handle"\n'


def left(dsn: str, queue: str) -> int:
    """Count the messages of a queue."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(f"select count(*) from pgmq.q_{queue}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def send(dsn: str, queue: str) -> None:
    """Send one message, as soon as the queue is there."""

    def try_once() -> bool:
        with psycopg.connect(dsn, autocommit=True) as connection:
            row = connection.execute("select to_regclass(%s) is not null", [f"pgmq.q_{queue}"]).fetchone()
            if row is None or not row[0]:
                return False
            connection.execute("select pgmq.send(%s, '{}')", [queue])
            return True

    eventually(try_once, what="the queue")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_clean_stop(start: Start, database: str, signum: signal.Signals) -> None:
    """It handles messages of a queue that it made itself, and ends with 0 on the first signal."""
    service = start(ONE, tasks=GOOD)
    send(database, "q")
    eventually(lambda: left(database, "q") == 0, timeout_s=60, what="the message's end")
    service.signal(signum)
    assert service.wait() == 0, service.log


def test_flags_are_enough(start: Start, database: str) -> None:
    """A queue and its handler may be given by flags alone."""
    service = start("", "--queue", "flags=tasks:handle", "--concurrency", "2", tasks=GOOD)
    send(database, "flags")
    eventually(lambda: left(database, "flags") == 0, timeout_s=60, what="the message's end")
    assert service.stop() == 0, service.log


@pytest.mark.parametrize("broken", ["raise RuntimeError('no licence')", "import os; os._exit(3)"])
def test_one_broken_import_does_not_stop_the_others(start: Start, database: str, tmp_path: Path, broken: str) -> None:
    """A module whose import fails is said at start; the other queues work."""
    (tmp_path / "broken.py").write_text(broken)
    service = start(ONE + '[queues.b]\nhandler = "broken:handle"\n', tasks=GOOD)
    send(database, "q")
    eventually(lambda: left(database, "q") == 0, timeout_s=60, what="the message's end")
    assert "warning: queue b: " in service.log
    assert service.stop() == 0, service.log


def test_every_import_broken(start: Start) -> None:
    """Where no queue has a handler that can be imported, it gives up with 1."""
    service = start(ONE, tasks="raise RuntimeError('no licence')\n")
    assert service.wait() == 1, service.log
    assert "no licence" in service.log


def test_signal_before_anything_was_started(start: Start, tmp_path: Path) -> None:
    """TERM while handlers are still being looked at is a clean stop."""
    service = start(ONE, tasks="open('importing', 'w').close()\nimport time\nwhile True: time.sleep(1)\n")
    eventually((tmp_path / "importing").exists, timeout_s=60, what="the import")
    assert service.stop() == 0, service.log
    assert "stopped before anything was started" in service.log


def test_an_application_with_packages_like_ours(start: Start, database: str, tmp_path: Path) -> None:
    """An application whose packages are called shared and child runs, from its own folder."""
    for name in ("shared", "child"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    tasks = "import shared, child\nassert shared.mine and child.mine\ndef handle(message): import shared.more\n"
    (tmp_path / "shared" / "more.py").write_text("")
    service = start(ONE, tasks=tasks)
    send(database, "q")
    eventually(lambda: left(database, "q") == 0, timeout_s=60, what="the message's end")
    assert service.stop() == 0, service.log

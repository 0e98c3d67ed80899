"""A little work of every kind in both modes: for servers, versions and roles that are not the usual ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.running import stage

__all__ = ["CONFIG", "TASKS", "work"]

CONFIG: Final = """
[queues.jobs]
handler = "tasks:handle"
concurrency = 2
on_success = "archive"
max_attempts = 2
max_deaths = 2
retry = { base = "50ms", jitter = false }
[queues.payments]
handler = "tasks:pay"
mode = "transactional"
concurrency = 2
on_success = "archive"
max_attempts = 2
max_deaths = 2
retry = { base = "50ms", jitter = false }
"""

TASKS: Final = """
import os, signal

def end(message):
    kind, when = message.body
    if message.attempt in when:
        if kind == "fails":
            raise ValueError("no")
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return message.dead_letter("no good") if kind == "rejects" else message.retry(after="10ms")

def handle(message):
    return end(message)

def pay(message, tx):
    tx.execute("INSERT INTO ledger (body, attempt) VALUES (%s, %s)", (message.raw.decode(), message.attempt))
    tx.send("receipts", message.body)
    return end(message)
"""

_BODIES: Final = (
    ["works", []],
    ["fails", [1]],
    ["fails", [1, 2]],
    ["dies", [1]],
    ["dies", [1, 2]],
    ["asks", [1]],
    ["rejects", [1]],
)
_DONE: Final = [(["asks", [1]], 2), (["dies", [1]], 2), (["fails", [1]], 2), (["works", []], 1)]
_REASONS: Final = [("dies", "died"), ("fails", "attempts_exhausted"), ("rejects", "rejected")]


def work(folder: Path, owner: str, dsn: str) -> None:
    """Run both modes by `dsn`: done, retried, dead-lettered, each as it should be, and business rows with them.

    `owner` is the DSN of who may make queues and tables.
    """
    with stage(folder, owner, CONFIG, TASKS) as on:
        on.service.dsn = dsn
        for queue in ("jobs", "payments", "receipts"):
            if not on.rows("SELECT FROM pgmq.meta WHERE queue_name = %s", queue):
                on.create(queue)
        on.connection.execute("CREATE TABLE ledger (body jsonb PRIMARY KEY, attempt int NOT NULL)")
        on.connection.execute("GRANT INSERT ON ledger TO public")
        on.connection.execute("GRANT SELECT, INSERT ON pgmq.q_receipts TO public")
        for queue in ("jobs", "payments"):
            on.send(*_BODIES, queue=queue)
        on.service.start()
        for queue in ("jobs", "payments"):
            on.until_empty(queue)
        assert on.service.stop() == 0
        for queue in ("jobs", "payments"):
            assert _sorted(on.archived(queue)) == _DONE
            assert sorted(map(_reason, on.letters(queue))) == _REASONS
        assert _sorted(on.rows("SELECT body, attempt FROM ledger")) == _DONE
        sent = [body for (body,) in on.rows("SELECT message FROM pgmq.q_receipts")]
        assert sorted(sent) == [body for body, _ in _DONE]
        assert on.events("notify.setup_failed") == on.events("internal_error") == []


def _sorted(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in rows)


def _reason(letter: Mapping[str, Any]) -> tuple[str, str]:
    return letter["message"][0], letter["reason"]

"""Transactional mode with two supervisors on one queue: what one of them has to charge, the other waits for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support.running import runs, stage
from tests.support.service import Service

CONFIG = """
[queues.jobs]
handler = "tasks:handle"
mode = "transactional"
concurrency = 2
max_deaths = 3
max_attempts = 10
retry = { base = "20ms", max = "100ms", jitter = false }
"""

DEADLY = """
import os, signal

def handle(message, tx):
    with open(os.environ["RAN"], "a") as file:
        file.write(f"{message.id} {message.attempt}\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_poison_message_of_two_supervisors_runs_max_deaths_times(tmp_path: Path, database: str) -> None:
    """Whoever claims it first after a death, nobody runs it before that death is charged."""
    (tmp_path / "other").mkdir()
    with stage(tmp_path, database, CONFIG, DEADLY) as on:
        on.create()
        other = Service(tmp_path / "other", database, CONFIG, tasks=DEADLY)
        environment = {"RAN": str(tmp_path / "ran")}
        sent = on.send(*range(20))
        try:
            for service in (on.service, other):
                service.start(env=environment)
            on.until_empty()
            assert [service.stop() for service in (on.service, other)] == [0, 0]
        finally:
            other.close()
        ran = Counter(msg_id for msg_id, _ in runs(tmp_path))
        assert ran == dict.fromkeys(sent, 3)
        letters = on.letters()
        assert [letter["source"]["deaths"] for letter in letters] == [3] * 20

"""Who is charged, seen from outside: deaths, attempts and refunds, across restarts, supervisors and freezes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.support.running import Stage, stage
from tests.support.service import Service
from tests.support.waiting import eventually

CONFIG = """
[queues.jobs]
handler = "tasks:handle"
mode = "{mode}"
concurrency = 2
visibility_timeout = "30s"
max_deaths = {deaths}
max_attempts = {attempts}
retry = {{ base = "10ms", max = "50ms", jitter = false }}
on_success = "archive"
"""

TASKS = """
import os, signal, time
def handle(message, tx=None):
    with open("ran", "a") as file:
        file.write(f"{message.id} {message.attempt}\\n")
    acts = message.body
    match acts[min(message.attempt, len(acts)) - 1]:
        case "die": os.kill(os.getpid(), signal.SIGKILL)
        case "exit": os._exit(0)
        case "raise": raise ValueError("no")
        case "retry": return message.retry("20ms")
"""

# max_deaths, max_attempts, what happens at each attempt (the last one again and again) -> reason, attempts, deaths
TABLE = [
    (3, 5, ["die"], ("died", 3, 3)),
    (3, 5, ["raise"], ("attempts_exhausted", 5, 0)),
    (3, 5, ["die", "raise"], ("attempts_exhausted", 5, 1)),
    (3, 5, ["raise", "die", "raise", "die"], ("died", 5, 3)),
    (3, 5, ["die", "exit", "fine"], None),
    (3, 5, ["retry", "retry", "retry", "retry", "fine"], None),
    (5, 2, ["die"], ("died", 2, 2)),
    (5, 2, ["raise", "die"], ("died", 2, 1)),
    (5, 2, ["die", "raise"], ("attempts_exhausted", 2, 1)),
    (1, 1, ["retry"], ("attempts_exhausted", 1, 0)),
    (1, 1, ["exit"], ("died", 1, 1)),
]


def runs(on: Stage) -> Counter[int]:
    """How often each message was run."""
    file = on.service.folder / "ran"
    return Counter(int(line.split()[0]) for line in file.read_text().splitlines()) if file.exists() else Counter()


@pytest.mark.parametrize("mode", ["regular", "transactional"])
@pytest.mark.parametrize("limits", [(3, 5), (5, 2), (1, 1)])
def test_deaths_and_attempts_have_limits_of_their_own(
    tmp_path: Path, database: str, limits: tuple[int, int], mode: str
) -> None:
    """Whichever limit is reached first ends the message, with the reason of its last end, and exactly then."""
    rows = [(acts, end) for deaths, attempts, acts, end in TABLE if (deaths, attempts) == limits]
    config = CONFIG.format(mode=mode, deaths=limits[0], attempts=limits[1])
    with stage(tmp_path, database, config, TASKS) as on:
        on.create()
        ids = on.send(*[acts for acts, _ in rows])
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        found = {
            letter["source"]["msg_id"]: (letter["reason"], letter["source"]["attempt"], letter["source"]["deaths"])
            for letter in on.letters()
        }
        assert [found.get(msg_id) for msg_id in ids] == [end for _, end in rows]
        assert [runs(on)[msg_id] for msg_id in ids] == [end[1] if end else len(acts) for acts, end in rows]


@pytest.mark.timeout(180)
def test_deaths_count_across_restarts_and_supervisors(tmp_path: Path, database: str) -> None:
    """Two supervisors of one queue, one restarted again and again: each message dies exactly max_deaths times."""
    config = CONFIG.format(mode="regular", deaths=4, attempts=20)
    with stage(tmp_path, database, config, TASKS) as on:
        on.create()
        other = Service(tmp_path, database, config)
        other.log_file = tmp_path / "other.log"
        ids = on.send(*[["die"]] * 12)
        on.service.start()
        other.start()
        try:
            for restart in (1, 2):
                eventually(lambda n=restart: runs(on).total() >= 12 * n, timeout_s=60, what="some deaths")
                assert on.service.stop() == 0
                on.service.start()
            on.until_empty(timeout_s=90)
            assert (on.service.stop(), other.stop()) == (0, 0)
        finally:
            other.close()
        assert runs(on) == Counter(dict.fromkeys(ids, 4))
        assert {(letter["reason"], letter["source"]["deaths"]) for letter in on.letters()} == {("died", 4)}


def test_what_a_frozen_supervisor_did_not_hear_is_charged_to_nobody(tmp_path: Path, database: str) -> None:
    """Its guard kills the child at the end of the lease: a lost lease, refunded, also with max_deaths = 1."""
    config = CONFIG.format(mode="regular", deaths=1, attempts=1).replace('"30s"', '"2s"')
    tasks = """
    import os, time
    def handle(message):
        print("pid", os.getpid(), flush=True)
        if message.deliveries < 3:
            time.sleep(3600)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(1)
        on.service.start()
        for freeze in (1, 2):
            eventually(lambda n=freeze: len(on.events("child.output")) == n, timeout_s=30, what="the handler")
            child = int(on.events("child.output")[-1]["line"].split()[1])
            on.service.signal(signal.SIGSTOP)
            eventually(lambda pid=child: is_dead(pid), timeout_s=5, what="the end of the child")
            on.service.signal(signal.SIGCONT)
        on.until_empty()
        assert on.service.stop() == 0
        assert (on.archived(), on.letters()) == ([(1, 3)], [])
        ends = on.events("child.ended")
        assert [(end["cause"], end["charged"]) for end in ends] == [("lease_lost", False)] * 2


def test_a_freeze_shorter_than_a_lease_disturbs_nobody(tmp_path: Path, database: str) -> None:
    """Messages that started unheard are not killed as unresponsive: none runs twice."""
    tasks = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id}\\n")
        time.sleep(0.02)
    """
    config = CONFIG.format(mode="regular", deaths=1, attempts=1).replace("concurrency = 2", "concurrency = 6")
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(*range(600))
        on.service.start()
        eventually(lambda: on.left() < 560, timeout_s=30, what="some work")
        on.service.signal(signal.SIGSTOP)
        stopped = Path(f"/proc/{on.service.pid}/stat")
        eventually(lambda: stopped.read_text().rpartition(")")[2].split()[0] == "T", what="the freeze")
        began = on.rows("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0]
        eventually(
            lambda: on.rows("SELECT extract(epoch FROM clock_timestamp())::float8 - %s > 6", began)[0][0],
            what="more than a dispatch deadline",
        )
        on.service.signal(signal.SIGCONT)
        on.until_empty()
        assert on.service.stop() == 0
        assert set(runs(on).values()) == {1}
        assert [(end["cause"], end) for end in on.events("child.ended")] == []


@pytest.mark.parametrize("standby", [0, 1])
def test_a_child_that_does_not_start_what_it_got_is_replaced(tmp_path: Path, database: str, standby: int) -> None:
    """SIGSTOP before a dispatch: killed as unresponsive, the message goes to another child, its attempts unchanged."""
    config = CONFIG.format(mode="regular", deaths=1, attempts=1) + f"standby = {standby}\n"
    with stage(tmp_path, database, config, TASKS) as on:
        on.create()
        on.service.start()
        eventually(lambda: len(on.events("child.ready")) == 2 + standby, timeout_s=30, what="idle children")
        os.kill(on.events("child.ready")[0]["pid"], signal.SIGSTOP)
        on.send(*[["fine"]] * 8)
        on.until_empty(timeout_s=30)
        assert on.service.stop() == 0
        assert (len(on.archived()), on.letters()) == (8, [])
        [end] = [end for end in on.events("child.ended") if end["cause"] != "retired"]
        assert (end["cause"], end["charged"]) == ("unresponsive", False)
        assert set(runs(on).values()) == {1}


def is_dead(pid: int) -> bool:
    """Gone, or a zombie that its frozen parent cannot reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

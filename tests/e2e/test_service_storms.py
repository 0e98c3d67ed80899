"""Kills without number, pressure on memory, cancels at the moment of completion: what is innocent does not notice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.control.client import Connection, ControlError
from supervisor.processes.oom import candidates
from tests.support.running import Stage, stage
from tests.support.waiting import eventually

CONFIG = """
[queues.jobs]
handler = "tasks:handle"
concurrency = {concurrency}
standby = {standby}
max_deaths = 1000
max_attempts = 2000
retry = {{ base = "10ms", max = "50ms" }}
on_success = "archive"
"""

TASKS = """
import time
def handle(message):
    time.sleep(0.02)
"""


def children(on: Stage) -> list[int]:
    """Children of the supervisor but its guard, of whatever age."""
    found = []
    for pid in map(int, Path(f"/proc/{on.service.pid}/task/{on.service.pid}/children").read_text().split()):
        with contextlib.suppress(OSError):
            if "guard_main" not in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def kill(pid: int) -> None:
    """SIGKILL; it may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def surplus(pid: int) -> set[str]:
    """What a child has open that it should not have; nothing, where it has just ended."""
    held = set()
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(file).partition(":")[0])
    return held - {"/dev/null", "pipe", "socket", "/memfd"}


@pytest.mark.timeout(180)
def test_children_killed_in_random_order_in_every_phase(tmp_path: Path, database: str) -> None:
    """200 kills while they start, idle, work and stop: every message succeeds, every slot works, nothing is parked."""
    dice = random.Random(20)
    pause = threading.Event()
    with stage(tmp_path, database, CONFIG.format(concurrency=6, standby=1), TASKS) as on:
        on.create()
        on.service.start()
        kills, sent = 0, 0
        while kills < 200:
            assert on.service.process.poll() is None, on.service.log[-3000:]
            if kills % 50 < 40 and (kills == 0 or on.left() < 20):
                on.send(*range(sent, sent + 60))
                sent += 60
            living = children(on)
            victims = living if dice.random() < 0.03 else living and [dice.choice(living)]
            for pid in victims:
                kill(pid)
            kills += len(victims)
            pause.wait(dice.random() * 0.1)
        on.until_empty()
        eventually(lambda: len(children(on)) == 7, timeout_s=30, what="all slots")
        # One that still imports has a file open now and then; what an earlier child or the parent left would stay.
        eventually(
            lambda: not any(map(surplus, children(on))), timeout_s=30, what="children without foreign descriptors"
        )
        on.send(*range(sent, sent + 60))
        on.service.signal(signal.SIGTERM)
        for pid in children(on):
            kill(pid)
        assert on.service.wait() == 0
        assert len(on.archived()) + on.left() == sent + 60
        assert not on.letters()
        assert not on.events("queue.parked")


def test_all_idle_children_killed_at_once(tmp_path: Path, database: str) -> None:
    """`pkill -9` is one event and no fault of the handler: work goes on within moments, no queue is parked."""
    with stage(tmp_path, database, CONFIG.format(concurrency=10, standby=0), TASKS) as on:
        on.create()
        on.service.start()
        for round_ in range(1, 4):
            eventually(lambda n=round_: len(on.events("child.ready")) >= 10 * n, timeout_s=60, what="idle children")
            for pid in children(on):
                kill(pid)
            on.send(*range(20))
            on.until_empty(timeout_s=30)
        assert not on.events("queue.parked")
        assert on.service.stop() == 0
        assert {read_ct for _, read_ct in on.archived()} == {1}


@pytest.fixture
def cramped() -> Iterator[Path]:
    """A v1 memory group with 400 MB below our own one."""
    places = candidates(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    own = next((path.parent for path in places if path.name == "memory.oom_control" and path.exists()), None)
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("needs a writable v1 memory control group")
    group = own / f"pgmq-supervisor-storm-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(400 << 20))
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text(), what="the end of all in the group")
    group.rmdir()


def test_under_pressure_the_kernel_takes_children(tmp_path: Path, database: str, cramped: Path) -> None:
    """Ten times 100 MB in a group of 400, and 1 GB: never the parent; the cause is oom, that of a plain kill is not."""
    tasks = """
    import os, signal, time
    def handle(message):
        if message.body == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        hoard = bytearray(b"x") * (message.body << 20)
        time.sleep(0.3)
    """
    config = CONFIG.format(concurrency=10, standby=0).replace("max_deaths = 1000", "max_deaths = 1")
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        enter = ["sh", "-c", f'echo $$ > {cramped}/cgroup.procs; exec "$@"', "sh"]
        on.service.start(within=enter)
        on.service.wait_for_log("child.ready")
        on.send(*[100] * 10, 1000, 1)
        on.until_empty()
        assert on.service.process.poll() is None
        on.send("kill")
        on.until_empty()
        assert on.service.stop() == 0
        letters = {letter["source"]["msg_id"]: letter for letter in on.letters()}
        causes = Counter((letter["reason"], letter["death"]["cause"]) for letter in letters.values())
        assert causes[("died", "signal")] == 1
        assert causes[("memory_limit", "oom")] == len(letters) - 1 >= 1
        assert 1000 in [letter["message"] for letter in letters.values()]


@pytest.mark.parametrize("mode", ["regular", "transactional"])
def test_a_cancel_at_the_moment_of_completion_never_hits_another_message(
    tmp_path: Path, database: str, mode: str
) -> None:
    """2 000 messages, half of them cancelled while they run or just end: only these can be dead letters."""
    config = CONFIG.format(concurrency=3, standby=0) + f'mode = "{mode}"\n[control]\nsocket = "{tmp_path}/control"\n'
    tasks = """
    import os, socket, time
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    to = ("127.0.0.1", int(os.environ["PORT"]))
    def handle(message, tx=None):
        sock.sendto(b"%d" % message.id, to)
        time.sleep((0, 0.0003, 0.001)[message.id % 3])
        message.raise_if_stopped()
    """
    with stage(tmp_path, database, config, tasks) as on, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as starts:
        starts.bind(("127.0.0.1", 0))
        starts.settimeout(1)
        on.create()
        ids = on.send(*range(2000))
        on.service.start(env={"PORT": str(starts.getsockname()[1])})
        on.service.wait_for_log("child.ready")
        connection = Connection(tmp_path / "control")
        cancelled = set()
        while True:
            try:
                msg_id = int(starts.recv(64))
            except TimeoutError:  # datagrams that found no room are lost: the queue says when it is over
                if on.left() == 0:
                    break
                continue
            if msg_id % 2:
                cancelled.add(msg_id)
                with contextlib.suppress(ControlError):
                    connection.ask("cancel", queue="jobs", msg_id=msg_id)
        connection.close()
        on.until_empty()
        assert on.service.stop() == 0
        dead = {letter["source"]["msg_id"]: letter["reason"] for letter in on.letters()}
        assert set(dead.values()) == {"cancelled"}
        assert set(dead) <= cancelled
        assert len(on.archived()) == len(ids) - len(dead)

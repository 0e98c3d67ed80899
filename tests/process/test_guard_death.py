"""The guard: nothing of a dead or frozen supervisor goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.core.types import SUCCESS
from supervisor.processes import marks, procfs
from supervisor.processes.leftovers import kill_left_overs_of_the_dead
from tests.support.breeding import PRELUDE
from tests.support.processes import alive, spec_for, world, write_handler
from tests.support.waiting import eventually

SCRIPT = Path(__file__).parents[1] / "support" / "small_supervisor.py"
BREED = (
    PRELUDE
    + """
def handle(message):
    tell(subprocess.Popen(['sleep', '997']).pid)
    tell(subprocess.Popen(['sleep', '997'], start_new_session=True).pid)
    fork_without_exec()
    double_fork()
    subprocess.run(['sh', '-c', 'nohup sleep 997 >/dev/null 2>&1 & echo pid $!'])
    three_levels()
    print('there', flush=True)
    while True: time.sleep(1)
"""
)


class Small:
    """A running small supervisor; `lines` grows as it speaks."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        """Its stdout goes to a file, so that no pipe can hold it up."""
        self.process = process
        self._log = log

    def lines(self) -> list[str]:
        """What it has said, in whole lines."""
        return self._log.read_text().rpartition("\n")[0].splitlines()

    def pids(self, *words: str) -> list[int]:
        """Pids that were said after one of these words."""
        return [int(line.split()[1]) for line in self.lines() if line.split(" ")[0] in words]

    def wait_for(self, line: str, *, times: int = 1) -> None:
        """Until it has said so."""
        eventually(lambda: self.lines().count(line) >= times, what=f"{line!r} in {self.lines()}")


@contextmanager
def small(tmp_path: Path, source: str, *, children: int = 1, lease_s: float = 0.0, loop: str = "") -> Iterator[Small]:
    """Start one; it is killed at the end, and so must everything else be."""
    write_handler(tmp_path, source)
    log = tmp_path / "said"
    arguments = [sys.executable, str(SCRIPT), str(tmp_path), str(children), str(lease_s), *([loop] if loop else [])]
    with log.open("w") as out, subprocess.Popen(arguments, stdout=out, text=True, start_new_session=True) as process:
        it = Small(process, log)
        try:
            yield it
        finally:
            process.kill()
            process.wait()
            eventually(lambda: not any(map(alive, it.pids("child", "pid", "guard"))), timeout_s=3)


def all_dead_within(pids: list[int], limit_s: float) -> None:
    """All are dead in time."""
    began = time.monotonic()
    eventually(lambda: not [pid for pid in pids if alive(pid)], timeout_s=10, what=f"the end of {pids}")
    assert time.monotonic() - began < limit_s


@pytest.mark.parametrize("loop", ["", "uvloop"])
def test_a_killed_supervisor_leaves_nothing_alive(tmp_path: Path, loop: str) -> None:
    """Children in C code, their helpers of every kind, and the guard itself are gone within a second."""
    with small(tmp_path, BREED, children=2, loop=loop) as it:
        it.wait_for("there", times=2)
        pids = it.pids("child", "pid", "guard")
        assert len(pids) == 2 + 1 + 2 * 8
        assert all(map(alive, pids))
        it.process.kill()
        it.process.wait()
        all_dead_within(pids, 1.0)


def test_a_supervisor_killed_with_its_group_leaves_nothing_alive(tmp_path: Path) -> None:
    """The guard has a session of its own: a signal to the group does not reach it."""
    with small(tmp_path, BREED) as it:
        it.wait_for("there")
        pids = it.pids("child", "pid", "guard")
        os.killpg(it.process.pid, signal.SIGKILL)
        it.process.wait()
        all_dead_within(pids, 1.0)


def test_a_supervisor_killed_while_it_starts_leaves_nothing_alive(tmp_path: Path) -> None:
    """At whatever moment."""
    for wait_for in ("parent", "guard", "child"):
        with small(tmp_path, BREED, children=3) as it:
            eventually(lambda it=it, word=wait_for: it.pids(word))
            it.process.kill()
            it.process.wait()
            all_dead_within(it.pids("child", "pid", "guard"), 1.0)


def test_a_process_without_a_mark_is_known_to_the_guard(tmp_path: Path) -> None:
    """Cleared environment, own session, double fork: the supervisor has seen it and named it."""
    source = (
        PRELUDE
        + "def handle(message):\n    double_fork(clean=True)\n    print('there', flush=True)\n    time.sleep(99)"
    )
    with small(tmp_path, source) as it:
        it.wait_for("there")
        never = threading.Event()
        never.wait(2.5)  # more than the period in which trees are looked at
        pids = it.pids("child", "pid", "guard")
        it.process.kill()
        it.process.wait()
        all_dead_within(pids, 1.0)


def test_a_frozen_supervisor_loses_its_children_at_the_deadline(tmp_path: Path) -> None:
    """Not before the lease's deadline, soon after it, helpers included; the other children go on."""
    with small(tmp_path, BREED, lease_s=2.5) as it:
        it.wait_for("dispatched")
        began = time.monotonic()
        it.wait_for("there")
        it.process.send_signal(signal.SIGSTOP)
        pids = it.pids("child", "pid")
        eventually(lambda: not any(map(alive, pids)), timeout_s=6)
        assert 2.2 < time.monotonic() - began < 3.5
        (guard,) = it.pids("guard")
        assert alive(guard)
        it.process.send_signal(signal.SIGCONT)
        it.wait_for("died SIGKILL")


def test_the_guard_is_deaf(tmp_path: Path) -> None:
    """TERM, INT and HUP do not end it, and an orderly close does."""
    with small(tmp_path, "def handle(message): ...") as it:
        it.wait_for("dispatched")
        (guard,) = it.pids("guard")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(guard, number)
        it.process.send_signal(signal.SIGUSR1)
        it.wait_for("closed")
        assert it.process.wait() == 0
        assert not alive(guard)


def test_a_killed_guard_is_replaced_and_knows_everybody(tmp_path: Path) -> None:
    """The next guard does what the first would have done."""
    with small(tmp_path, BREED, children=2) as it:
        it.wait_for("there", times=2)
        (guard,) = it.pids("guard")
        parent = it.process.pid
        before = set(procfs.read_children(parent))
        os.kill(guard, signal.SIGKILL)
        new = eventually(lambda: set(procfs.read_children(parent)) - before)
        (successor,) = new
        eventually(lambda: b"pgmq-guard" in Path(f"/proc/{successor}/comm").read_bytes())
        pids = [*it.pids("child", "pid"), successor]
        it.process.kill()
        it.process.wait()
        all_dead_within(pids, 1.0)


def test_guard_and_supervisor_killed_together_are_swept_by_the_next_start(tmp_path: Path) -> None:
    """What both left is found by its mark; a living supervisor's processes are not touched."""
    with small(tmp_path, BREED) as it:
        it.wait_for("there")
        (guard,) = it.pids("guard")
        os.kill(guard, signal.SIGSTOP)
        os.kill(it.process.pid, signal.SIGKILL)
        os.kill(guard, signal.SIGKILL)
        it.process.wait()
        left = [pid for pid in it.pids("pid") if alive(pid)]
        assert left
        other = tmp_path / "other"
        other.mkdir()
        with small(other, BREED) as living:
            living.wait_for("there")
            assert not any(map(alive, left))
            kill_left_overs_of_the_dead(procfs.pid_namespace())
            assert all(map(alive, living.pids("child", "pid", "guard")))


async def test_an_idle_child_has_no_deadline(tmp_path: Path) -> None:
    """A lease that ends with its message harms nobody later."""
    async with world(spec_for(tmp_path, "def handle(message): ...")) as it:
        child = await it.ready()
        assert await it.finished(it.dispatch(child, lease_s=0.3)) == SUCCESS
        guard = it.processes._guard
        slot = it.processes._table.get(child).guard_slot  # type: ignore[union-attr]
        assert guard._table.deadline(slot) == 0.0


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("{name}/{pid}.{start}.{namespace}:3", False),
        ("{name}/{pid}.1.{namespace}:3", True),
        ("{name}/{pid}.1.1:3", False),
    ],
)
def test_a_mark_tells_whether_its_supervisor_lives(text: str, dead: bool) -> None:
    """Pid and start name a process; another PID namespace cannot be judged from here."""
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    namespace = procfs.pid_namespace()
    mark = marks.parse(text.format(name="a-b", pid=os.getpid(), start=stat.start_ticks, namespace=namespace))
    assert mark is not None
    assert mark.child == 3
    assert marks.owner_is_dead(mark, namespace) is dead

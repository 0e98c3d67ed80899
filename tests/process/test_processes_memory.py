"""Memory: limits on the tree, and deaths by the kernel told apart from other SIGKILLs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.processes.oom import OomWatch, candidates, find_counter, read_counter
from tests.support.waiting import eventually

SCRIPT = Path(__file__).parents[1] / "support" / "small_supervisor.py"


class Counter:
    """A counter and a clock that a test turns."""

    def __init__(self) -> None:
        """Start at 5 kills, at second 100."""
        self.kills = 5
        self.now = 100.0

    def watch(self) -> OomWatch:
        """A watch on it."""
        return OomWatch(clock=lambda: self.now, counter=lambda: self.kills)


def test_an_increment_answers_for_one_death() -> None:
    """Two SIGKILLs and one increment: the kernel killed one of them."""
    world = Counter()
    watch = world.watch()
    assert not watch.claim()
    world.kills += 1
    assert watch.claim()
    assert not watch.claim()


def test_an_increment_seen_by_the_timer_still_counts() -> None:
    """The timer may see it a moment before the death is seen."""
    world = Counter()
    watch = world.watch()
    world.kills += 1
    watch.note()
    world.now += 0.5
    assert watch.claim()


def test_an_old_increment_explains_nothing() -> None:
    """A kill of somebody else, long before."""
    world = Counter()
    watch = world.watch()
    world.kills += 1
    watch.note()
    world.now += 60
    assert not watch.claim()


def test_where_the_counter_is() -> None:
    """v2 first, then v1; the mount may show only a part of the hierarchy (a container)."""
    mountinfo = (
        "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
        "31 1 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    cgroup = "4:memory:/docker/abc/inner\n0::/system.slice/x.service\n"
    assert [str(path) for path in candidates(cgroup, mountinfo)] == [
        "/sys/fs/cgroup/system.slice/x.service/memory.events",
        "/sys/fs/cgroup/memory.events",
        "/sys/fs/cgroup/memory/inner/memory.oom_control",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ]


def test_both_kinds_of_counter_are_read(tmp_path: Path) -> None:
    """memory.events and memory.oom_control use the same word; a file without it is none."""
    events, control, other = tmp_path / "e", tmp_path / "c", tmp_path / "o"
    events.write_text("low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 5\n")
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    other.write_text("low 0\n")
    assert [read_counter(path) for path in (events, control, other, tmp_path / "none")] == [4, 6, None, None]
    assert find_counter()() >= 0


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A v1 memory group with 120 MB below our own one."""
    own = next(
        (
            path.parent
            for path in candidates(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
            if path.name == "memory.oom_control" and path.exists()
        ),
        None,
    )
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("needs a writable v1 memory control group")
    group = own / f"pgmq-supervisor-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(120 << 20))
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text(), what="the end of all in the group")
    group.rmdir()


def test_the_kernels_kill_is_told_apart(tmp_path: Path, small_cgroup: Path) -> None:
    """Under pressure the victim is a child, never the supervisor or the guard, and the facts say oom."""
    (tmp_path / "app.py").write_text("def handle(message):\n    hold = bytearray(b'x') * (300 << 20)\n")
    log = tmp_path / "said"
    enter = f"echo $$ > {small_cgroup}/cgroup.procs; exec {sys.executable} {SCRIPT} {tmp_path} 1 0"
    with log.open("w") as out, subprocess.Popen(["sh", "-c", enter], stdout=out) as process:
        try:
            eventually(lambda: "died SIGKILL oom" in log.read_text().splitlines())
            assert process.poll() is None
        finally:
            process.kill()

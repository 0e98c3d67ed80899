"""Every way to die is told as what it was, and costs nobody else anything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from supervisor.core.events import ChildBootFailed, ChildDied, ChildReady, MessageStarted, SpawnFailed
from supervisor.core.types import SUCCESS
from supervisor.processes.launcher import PopenLauncher
from tests.support.processes import alive, open_fds, spec_for, wait_for_end, world

KILLS_ITSELF = "import os\ndef handle(message): os.kill(os.getpid(), message.body)"


@pytest.mark.parametrize("name", ["SIGILL", "SIGABRT", "SIGBUS", "SIGSEGV", "SIGFPE", "SIGUSR1", "SIGKILL"])
async def test_a_signal_is_named(tmp_path: Path, name: str) -> None:
    """Signals by name; fatal ones leave the stack of the handler."""
    async with world(spec_for(tmp_path, KILLS_ITSELF)) as it:
        child = await it.ready()
        it.dispatch(child, str(int(signal.Signals[name])).encode())
        facts = await it.died(child)
        assert (facts.exit_code, facts.signal, facts.oom) == (None, name, False)
        if name in {"SIGILL", "SIGABRT", "SIGBUS", "SIGSEGV", "SIGFPE"}:
            assert "app.py" in facts.stack


@pytest.mark.parametrize(("source", "code"), [("os._exit(0)", 0), ("os._exit(7)", 7)])
async def test_an_exit_in_mid_task_is_a_death(tmp_path: Path, source: str, code: int) -> None:
    """Also exit code 0 is no success."""
    async with world(spec_for(tmp_path, f"import os\ndef handle(message): {source}")) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        facts = await it.died(child)
        assert (facts.exit_code, facts.signal) == (code, None)
        assert it.outcome(claim) is None


async def test_the_peak_of_memory_is_the_childs_own(tmp_path: Path) -> None:
    """A fat supervisor does not show in a thin child's peak; a fat child shows although it died at once."""
    ballast = bytearray(os.urandom(1 << 20)) * 300
    source = """
        import os
        def handle(message):
            hold = bytearray(message.body << 20)
            hold[::4096] = b'x' * len(hold[::4096])
            os._exit(1)
    """
    async with world(spec_for(tmp_path, source)) as it:
        thin, fat = await it.ready(), await it.ready()
        it.dispatch(thin, b"1")
        it.dispatch(fat, b"600")
        assert 5_000 < (await it.died(thin)).max_rss_kb < 150_000
        assert 600_000 < (await it.died(fat)).max_rss_kb < 800_000
    del ballast


async def test_output_and_cpu_are_in_the_facts(tmp_path: Path) -> None:
    """The last output, also without a newline, and the seconds of CPU."""
    source = """
        import os, sys, time
        def handle(message):
            print('first'); sys.stderr.write('no newline')
            until = time.process_time() + 0.2
            while time.process_time() < until: pass
            os.kill(os.getpid(), 9)
    """
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        facts = await it.died(child)
        assert facts.output_tail == "first\nno newline"
        assert it.output_of(claim) == ["first", "no newline"]
        assert facts.cpu_s >= 0.2


async def test_a_death_touches_no_other_child(tmp_path: Path) -> None:
    """One of several dies; the others finish."""
    source = "import os, time\ndef handle(message):\n    time.sleep(0.3)\n    if message.body: os.kill(os.getpid(), 9)"
    async with world(spec_for(tmp_path, source)) as it:
        children = [await it.ready() for _ in range(4)]
        claims = [it.dispatch(child, b"1" if number == 2 else b"0") for number, child in enumerate(children)]
        await it.died(children[2])
        for number in (0, 1, 3):
            assert await it.finished(claims[number]) == SUCCESS


async def test_an_import_that_fails_is_told_before_the_end(tmp_path: Path) -> None:
    """BOOT_FAILED with the reason, then the death with exit code 78."""
    async with world(spec_for(tmp_path, "import no_such_library")) as it:
        child = it.spawn()
        facts = await it.died(child)
        assert facts.exit_code == 78
        failed = await it.event(ChildBootFailed, child)
        assert failed.kind == "import"
        assert "no_such_library" in failed.error


async def test_a_program_that_cannot_be_executed_is_told(tmp_path: Path) -> None:
    """Spawn errors are events, and leave no descriptor open."""
    async with world(
        spec_for(tmp_path, "def handle(message): ..."), launcher=PopenLauncher(interpreter="/no/such/python")
    ) as it:
        before = open_fds()
        child = it.spawn()
        failed = await it.event(SpawnFailed, child)
        assert "No such file" in failed.error
        assert open_fds() == before


async def test_an_interpreter_that_fails_is_a_death(tmp_path: Path) -> None:
    """A program that ends at once is told with its exit code."""
    async with world(
        spec_for(tmp_path, "def handle(message): ..."), launcher=PopenLauncher(interpreter="/bin/false")
    ) as it:
        child = it.spawn()
        assert (await it.died(child)).exit_code == 1
        assert not any(isinstance(event, ChildReady) for event in it.events)


async def test_200_kills_leave_nothing_behind(tmp_path: Path) -> None:
    """Descriptors flat, no zombie, whatever the child was doing when it was killed."""
    async with world(spec_for(tmp_path, "import time\ndef handle(message): time.sleep(600)")) as it:
        first = await it.ready()
        it.kill(first)
        await it.died(first)
        before = open_fds()
        for round_number in range(50):
            children = [it.spawn() for _ in range(4)]
            if round_number % 5 == 0:
                await it.event(ChildReady, children[0])
                it.dispatch(children[0])
            for child in children:
                it.kill(child, with_stack=round_number % 10 == 0)
            for child in children:
                await it.died(child)
        assert sum(isinstance(event, ChildDied) for event in it.events) == 201
        assert open_fds() == before
        assert not it.adopted()


async def test_a_child_holds_only_what_it_needs(tmp_path: Path) -> None:
    """No descriptor of the supervisor or of another child is in a child or in the guard."""
    stranger = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(stranger, True)
    try:
        async with world(spec_for(tmp_path, "def handle(message): ...")) as it:
            first, second = await it.ready(), await it.ready()
            guard_pid = it.processes._guard.pid
            assert guard_pid is not None
            one, two, guard = (held_by(pid) for pid in (it.pids[first], it.pids[second], guard_pid))
            folder = os.stat(tmp_path)
            assert not any((folder.st_dev, folder.st_ino) in held for held in (one, two, guard))
            assert not one & two
            assert not guard & (one | two)
            assert len(one) == 4  # two pipes, stack, output
            assert alive(it.pids[first])
    finally:
        os.close(stranger)


def held_by(pid: int) -> set[tuple[int, int]]:
    """What a process holds open, besides pidfds (which all are one file to some kernels) and what it has from us."""
    shared = {(stat.st_dev, stat.st_ino) for stat in (os.stat(f"/proc/self/fd/{number}") for number in (0, 1, 2))}
    null = os.stat("/dev/null")
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        if "pidfd" not in os.readlink(path):
            stat = os.stat(path)
            found.add((stat.st_dev, stat.st_ino))
    return found - shared - {(null.st_dev, null.st_ino)}


async def test_a_death_right_after_the_start_is_told_after_it(tmp_path: Path) -> None:
    """No frame says that it had begun, and nobody has looked yet."""
    async with world(spec_for(tmp_path, "import os\ndef handle(message): os._exit(3)")) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        wait_for_end(it.pids[child])  # the loop stands still: nothing looks before the end is seen
        await it.died(child)
        told = [event for event in it.events if isinstance(event, MessageStarted | ChildDied)]
        assert [type(event) for event in told] == [MessageStarted, ChildDied]
        assert told[0] == MessageStarted(child, claim)


async def test_a_start_is_that_of_its_own_message(tmp_path: Path) -> None:
    """A child that had begun an earlier message dies before it has begun this one: nobody says that it had."""
    async with world(spec_for(tmp_path, "def handle(message): pass")) as it:
        child = await it.ready()
        assert await it.finished(it.dispatch(child)) == SUCCESS
        os.kill(it.pids[child], signal.SIGSTOP)
        claim = it.dispatch(child)
        it.kill(child)
        await it.died(child)
        assert not any(isinstance(event, MessageStarted) and event.claim_id == claim for event in it.events)


async def test_a_death_before_the_start_says_so(tmp_path: Path) -> None:
    """A handler cut our file off and its message ended; the next one is not begun: its mark has no place."""
    source = """
        import contextlib, os
        def handle(message):
            for fd in range(3, 1024):
                with contextlib.suppress(OSError): os.ftruncate(fd, 0)
    """
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        assert await it.finished(it.dispatch(child)) == SUCCESS
        claim = it.dispatch(child)
        assert (await it.died(child)).signal == "SIGBUS"
        assert not any(isinstance(event, MessageStarted) and event.claim_id == claim for event in it.events)

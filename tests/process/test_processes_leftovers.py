"""What handlers start and leave behind is gone within a second of their end, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from supervisor.core.commands import SendExit
from supervisor.core.events import ChildReady, MemoryMeasured
from supervisor.core.types import SUCCESS
from supervisor.processes import procfs
from supervisor.processes.killing import kill_exactly
from tests.support.breeding import PRELUDE, WAYS
from tests.support.processes import World, alive, spec_for, wait_for_end, world

END = {
    "kill": "os.kill(os.getpid(), 9)",
    "exit": "os._exit(0)",
    "hang": "time.sleep(3600)",
}


def told_pids(it: World) -> list[int]:
    """Pids that a handler printed."""
    return [int(line.split()[1]) for _, _, line in it.lines if line.startswith("pid ")]


def handler(body: str) -> str:
    """A handler with the tools above."""
    return PRELUDE + "def handle(message):\n    " + body.replace("\n", "\n    ") + "\n"


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("way", WAYS)
async def test_nothing_survives_its_child(tmp_path: Path, way: str, end: str) -> None:
    """Whatever way it was started, and however the child ended: ChildDied comes when all is gone."""
    async with world(spec_for(tmp_path, handler(WAYS[way] + "\nprint('there', flush=True)\n" + END[end]))) as it:
        child = await it.ready()
        it.dispatch(child)
        await it.until(lambda: any(line == "there" for _, _, line in it.lines))
        began = time.monotonic()
        if end == "hang":
            it.kill(child)
        await it.died(child)
        assert time.monotonic() - began < 1.0
        pids = told_pids(it)
        assert pids
        assert not [pid for pid in pids if alive(pid)]
        assert not it.adopted()
        assert it.swept >= len(pids)


async def test_a_kill_is_for_the_whole_group_at_once(tmp_path: Path) -> None:
    """Nobody of it may go on until the sweep comes by: it stands still here."""
    async with world(spec_for(tmp_path, handler(WAYS["plain"] + "\ntime.sleep(3600)"))) as it:
        child = await it.ready()
        it.dispatch(child)
        [pid] = await it.until(lambda: told_pids(it))
        it.kill(child)
        wait_for_end(pid)
        await it.died(child)


def test_a_process_is_killed_only_with_its_own_start_time() -> None:
    """Its number alone may be another's by now."""
    with subprocess.Popen(["sleep", "999"]) as sleeper, contextlib.ExitStack() as stack:
        stack.callback(sleeper.kill)
        stat = procfs.read_stat(sleeper.pid)
        assert stat is not None
        assert not kill_exactly(sleeper.pid, stat.start_ticks - 1)
        assert sleeper.poll() is None
        assert kill_exactly(sleeper.pid, stat.start_ticks)
        assert sleeper.wait() == -signal.SIGKILL


@pytest.mark.parametrize("way", ["shell", "double_fork", "cleared_environment"])
async def test_an_orphan_that_outlives_its_message_is_swept_while_the_child_lives(tmp_path: Path, way: str) -> None:
    """A daemon of a message that ended goes within a second; the child stays."""
    async with world(spec_for(tmp_path, handler(WAYS[way]))) as it:
        child = await it.ready()
        assert await it.finished(it.dispatch(child)) == SUCCESS
        (pid,) = await it.until(lambda: told_pids(it))
        await it.until(lambda: not alive(pid) and it.swept == 1, timeout_s=1.0)
        assert await it.finished(it.dispatch(child)) == SUCCESS


async def test_an_orphan_is_not_taken_for_another_childs(tmp_path: Path) -> None:
    """Nothing but its stamp says whose it is; a child that boots meanwhile does not become its owner."""
    booting = tmp_path / "booting"
    source = f"import os, time\nbooting = {str(booting)!r}\n"
    source += "if os.path.exists(booting): os.rename(booting, booting + '.seen'); time.sleep(1)\n"
    async with world(spec_for(tmp_path, source + handler(WAYS["cleared_environment"]))) as it:
        child = await it.ready()
        booting.touch()
        other = it.spawn()
        await it.until(lambda: not booting.exists())
        assert await it.finished(it.dispatch(child)) == SUCCESS
        (pid,) = await it.until(lambda: told_pids(it))
        await it.event(ChildReady, other)
        await it.until(lambda: not alive(pid) and it.swept == 1, timeout_s=1.5)


@pytest.mark.parametrize("way", ["plain", "setsid", "nohup", "three_levels"])
async def test_a_helper_that_nobody_waits_for_goes_with_its_message(tmp_path: Path, way: str) -> None:
    """Thrown-away `Popen` objects: gone within a second of a normal end, no zombie stays, and each is counted."""
    async with world(spec_for(tmp_path, handler(WAYS[way]))) as it:
        child = await it.ready()
        assert await it.finished(it.dispatch(child)) == SUCCESS
        pids = await it.until(lambda: told_pids(it))
        await it.until(lambda: it.swept >= len(pids), timeout_s=2.0)
        assert [procfs.read_stat(pid) for pid in pids] == [None] * len(pids)
        assert await it.finished(it.dispatch(child)) == SUCCESS


async def test_a_helper_that_is_kept_for_the_next_message_stays(tmp_path: Path) -> None:
    """A pool or driver that a handler makes at its first message is not broken by its end."""
    first = "if not kept: kept.append(subprocess.Popen(['sleep', '999']))\n"
    body = first + "tell(kept[0].pid)\nassert kept[0].poll() is None"
    async with world(spec_for(tmp_path, "kept = []\n" + handler(body))) as it:
        child = await it.ready()
        for _ in range(3):
            assert await it.finished(it.dispatch(child)) == SUCCESS
        assert it.swept == 0
        it.processes.send_exit(SendExit(child))
        await it.died(child)
        assert it.swept == 1


async def test_an_orphan_of_the_message_in_hand_stays(tmp_path: Path) -> None:
    """A daemon may work for its message as long as the message runs."""
    body = "double_fork()\nwhile not os.path.exists(message.body): time.sleep(0.01)"
    flag = tmp_path / "go on"
    async with world(spec_for(tmp_path, handler(body))) as it:
        child = await it.ready()
        claim = it.dispatch(child, f'"{flag}"'.encode())
        (pid,) = await it.until(lambda: told_pids(it))
        await asyncio.sleep(1.2)  # two looks at the orphans: what is awaited is that nothing happens
        assert alive(pid)
        flag.touch()
        assert await it.finished(claim) == SUCCESS
        await it.until(lambda: not alive(pid), timeout_s=1.5)


async def test_helpers_of_the_module_stay_as_long_as_the_child(tmp_path: Path) -> None:
    """A pool and a daemon that an import started belong to the module: swept at the child's end only."""
    source = PRELUDE + "double_fork()\ntell(subprocess.Popen(['sleep', '999']).pid)\ndef handle(message): ...\n"
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        await it.finished(it.dispatch(child))
        pids = await it.until(lambda: told_pids(it))
        assert len(pids) == 2
        await asyncio.sleep(1.2)  # two looks at the orphans: what is awaited is that nothing happens
        assert all(map(alive, pids))
        it.processes.send_exit(SendExit(child))
        assert (await it.died(child)).exit_code == 0
        assert not any(map(alive, pids))
        assert it.swept == 2


async def test_a_daemon_that_holds_the_output_is_not_waited_for(tmp_path: Path) -> None:
    """The end of a child is its pidfd's, not the end of a pipe that somebody else has open."""
    source = handler("double_fork()\nos._exit(3)")
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        it.dispatch(child)
        assert (await it.died(child, timeout_s=2)).exit_code == 3


async def test_strangers_are_left_alone(tmp_path: Path) -> None:
    """A server that this supervisor started is not swept, and no status that somebody waits for is stolen."""
    with subprocess.Popen(["sh", "-c", "read line; exit 5"], stdin=subprocess.PIPE) as own:  # noqa: ASYNC220 - the point
        assert own.stdin is not None
        async with world(spec_for(tmp_path, "def handle(message): ...")) as it:
            it.processes.protect(own.pid)
            shell = await asyncio.create_subprocess_shell("sleep 998 >/dev/null & echo $!", stdout=subprocess.PIPE)
            adopted = int((await shell.communicate())[0])
            child = await it.ready()
            it.kill(child)
            await it.died(child)
            own.stdin.close()
            await asyncio.sleep(1.7)  # beyond the time after which an unwanted zombie is reaped
            assert alive(adopted)
            os.kill(adopted, signal.SIGKILL)
            await it.until(lambda: procfs.read_stat(adopted) is None, timeout_s=3, what="the reaping of a stranger")
    assert own.returncode == 5


async def test_memory_of_the_whole_tree_is_measured(tmp_path: Path) -> None:
    """What helpers and orphans of a message hold counts; below the limit nothing is told."""
    source = handler(
        """
        code = 'x = bytearray(b"x" * (40 << 20)); import time; time.sleep(999)'
        if message.body:
            subprocess.Popen([sys.executable, '-c', code])
            subprocess.run(['sh', '-c', f"{sys.executable} -c '{code}' & "])
            time.sleep(999)
        time.sleep(0.5)
        """.replace("\n        ", "\n").strip()
    )
    async with world(spec_for(tmp_path, source, memory_limit_bytes=80 << 20)) as it:
        child = await it.ready()
        await it.finished(it.dispatch(child, b"0"))
        assert not any(isinstance(event, MemoryMeasured) for event in it.events)
        it.dispatch(child, b"1")
        measured = await it.event(MemoryMeasured, child)
        assert measured.tree_bytes > 80 << 20

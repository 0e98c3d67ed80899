"""Children that do not move: they die when they are told to, and say where they stood."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from supervisor.core.commands import SendStop, SendTerm
from supervisor.core.types import SUCCESS, StopReason
from tests.support.processes import spec_for, world

HANGS = {
    "sleep": "import time\ndef handle(message): print(1); time.sleep(3600)",
    "spin": "def handle(message):\n    print(1)\n    while True: pass",
    "socket": "import socket\ndef handle(message): print(1); a, b = socket.socketpair(); a.recv(1)",
    "lock": "import threading\ndef handle(message): print(1); lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "regex": "import re\ndef handle(message): print(1); re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "deaf": """
        import signal, time
        def handle(message):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print(1)
            while True:
                try: time.sleep(3600)
                except BaseException: pass
    """,
    "blocked": """
        import ctypes, signal
        def handle(message):
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            libc = ctypes.PyDLL(None)
            print(1)
            while True: libc.usleep(1000000)
    """,
}


@pytest.mark.parametrize("name", HANGS)
async def test_a_hang_is_killed_with_its_stack(tmp_path: Path, name: str) -> None:
    """Dead well within half a second of the kill, and the stack names the handler."""
    async with world(spec_for(tmp_path, HANGS[name])) as it:
        child = await it.ready()
        it.dispatch(child)
        await it.until(lambda: it.lines)
        began = time.monotonic()
        it.kill(child, with_stack=True)
        facts = await it.died(child, timeout_s=5)
        assert time.monotonic() - began < 0.5
        assert facts.signal == "SIGKILL"
        assert "app.py" in facts.stack
        assert "handle" in facts.stack


async def test_a_stopped_child_is_killed(tmp_path: Path) -> None:
    """SIGSTOP keeps no process alive; there is no stack, and nobody waits for one."""
    async with world(spec_for(tmp_path, HANGS["sleep"])) as it:
        child = await it.ready()
        os.kill(it.pids[child], signal.SIGSTOP)
        claim = it.dispatch(child)
        began = time.monotonic()
        it.kill(child, with_stack=True)
        assert (await it.died(child, timeout_s=5)).signal == "SIGKILL"
        assert time.monotonic() - began < 0.5
        assert it.outcome(claim) is None


async def test_a_hanging_import_is_killed_with_its_stack(tmp_path: Path) -> None:
    """Also before READY the stack says where."""
    async with world(spec_for(tmp_path, "print('importing', flush=True)\nimport time\ntime.sleep(3600)")) as it:
        child = it.spawn()
        await it.until(lambda: it.lines)
        it.kill(child, with_stack=True)
        assert "app.py" in (await it.died(child)).stack


async def test_an_earlier_stack_is_not_shown_again(tmp_path: Path) -> None:
    """The stack of a death is what was written since its message was handed over."""
    source = """
        import os, signal, time
        def handle(message):
            if message.body: os.kill(os.getpid(), signal.SIGUSR2); time.sleep(0.05)
            else: os._exit(1)
    """
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        await it.finished(it.dispatch(child, b"1"))
        it.dispatch(child, b"0")
        assert (await it.died(child)).stack == ""


async def test_a_stop_request_is_seen(tmp_path: Path) -> None:
    """STOP and TERM reach the handler, which ends by itself."""
    source = """
        import time
        def handle(message):
            while not message.stop_requested: time.sleep(0.01)
    """
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        await it.started(claim)
        it.processes.send_term(SendTerm(child))
        it.processes.send_stop(SendStop(child, claim, StopReason.SHUTDOWN))
        assert await it.finished(claim) == SUCCESS


async def test_kill_twice_is_kill_once(tmp_path: Path) -> None:
    """A second kill without a stack does not wait for the first one's."""
    async with world(spec_for(tmp_path, HANGS["sleep"])) as it:
        child = await it.ready()
        os.kill(it.pids[child], signal.SIGSTOP)
        it.kill(child, with_stack=True)
        it.kill(child)
        it.kill(child)
        assert (await it.died(child, timeout_s=5)).signal == "SIGKILL"
        it.kill(child)
        it.dispatch(child)

"""As PID 1 of a container: adopt, reap, and take everything along at the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.breeding import PRELUDE
from tests.support.processes import write_handler

INSIDE = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from supervisor.processes import procfs
from supervisor.processes.spec import ChildSpec
from tests.support.processes import world

async def main():
    assert os.getpid() == 1
    async with world(ChildSpec(handler='app:handle', app_dir=sys.argv[1])) as it:
        child = await it.ready()
        await it.finished(it.dispatch(child))
        # an orphan of a process that somebody put into the namespace from outside, dying after its parent
        daemon = await asyncio.create_subprocess_exec('sh', '-c', '(sleep 0.2; exit 3) & exit 0')
        await daemon.wait()
        def zombies():
            stats = {pid: procfs.read_stat(pid) for pid in procfs.all_pids()}
            return [pid for pid, stat in stats.items() if stat and not stat.alive]
        guard = it.processes._guard.pid
        await it.until(lambda: set(procfs.all_pids()) == {1, guard, it.pids[child]} and not zombies(), timeout_s=5)
        it.kill(child)
        assert (await it.died(child)).signal == 'SIGKILL'
    print('all reaped', procfs.all_pids())

asyncio.run(main())
"""


def test_as_pid_1_everything_is_reaped(tmp_path: Path) -> None:
    """Strangers too, and nobody's exit status is stolen."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-pf", "true"], check=False).returncode != 0:
        pytest.skip("needs PID namespaces")
    write_handler(tmp_path, PRELUDE + "def handle(message): double_fork()")
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        ["unshare", "-pf", "--mount-proc", sys.executable, "-c", INSIDE, str(tmp_path), str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == "all reaped [1]\n", ran.stderr

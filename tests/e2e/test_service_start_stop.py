"""Starts, stops and what a supervisor is called in: early signals, PID 1, applications with packages of our names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.running import Stage, stage
from tests.support.waiting import eventually

CONFIG = """
[shutdown]
grace = "1s"
kill_after = "2s"
[queues.jobs]
handler = "tasks:handle"
concurrency = 2
on_success = "archive"
"""

TASKS = """
import subprocess, time
def handle(message):
    print("begins", flush=True)
    if message.body == "litter":
        subprocess.run(["sh", "-c", "(sleep 0.1; exit 3) & exit 0"])
    if message.body == "slow":
        time.sleep(0.5)
    if message.body == "hang":
        time.sleep(3600)
"""

AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def namespaces() -> None:
    """Skip where PID namespaces cannot be made."""
    if shutil.which("unshare") is None or subprocess.run([*AS_PID_1, "true"], check=False).returncode != 0:
        pytest.skip("needs PID namespaces")


def child_of(pid: int) -> int | None:
    """The first child of a process, None while it has none."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(pids[0]) if pids else None


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a function for a signal."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("within", [(), AS_PID_1], ids=["plain", "as PID 1"])
def test_a_signal_while_it_still_imports_is_a_clean_stop(
    tmp_path: Path, database: str, within: tuple[str, ...]
) -> None:
    """TERM at the first moment at which it can be heard: 0, and nothing was started."""
    if within:
        namespaces()
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.service.start(within=within)
        pid = eventually(lambda: child_of(on.service.pid), what="PID 1") if within else on.service.pid
        eventually(lambda: catches(pid, signal.SIGTERM), what="its first function for TERM")
        os.kill(pid, signal.SIGTERM)
        assert on.service.wait(10) == 0
        assert on.service.log == "stopped before anything was started\n"


def test_as_pid_1_it_reaps_forwards_and_stops(tmp_path: Path, database: str) -> None:
    """Left-overs are no zombies, a running message finishes after TERM, one that hangs is killed: 0 and 3."""
    namespaces()
    with stage(tmp_path, database, CONFIG, TASKS) as on:
        on.create()
        for body, code in (("slow", 0), ("hang", 3)):
            on.service.start(within=AS_PID_1)
            on.send("litter", "litter")
            on.until_empty()
            on.send(body)
            first = eventually(lambda: child_of(on.service.pid), what="PID 1")
            eventually(lambda pid=first: "Z" not in states_below(pid), timeout_s=5, what="no zombie")
            begun = 3 if body == "slow" else 6
            eventually(lambda n=begun: len(on.events("child.output")) == n, timeout_s=30, what="the message")
            os.kill(first, signal.SIGTERM)
            assert on.service.wait(15) == code
        assert [body for body, _ in on.archived()] == ["litter", "litter", "slow", "litter", "litter"]


def states_below(pid: int) -> str:
    """States of the children of a process."""
    found = ""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        stat = Path(f"/proc/{child}/stat")
        if stat.exists():
            found += stat.read_text().rpartition(")")[2].split()[0]
    return found


def test_the_kill_of_pid_1_ends_everything(tmp_path: Path, database: str) -> None:
    """The namespace goes with it; a start afterwards takes the work up when the lease is over."""
    namespaces()
    config = CONFIG + 'visibility_timeout = "2s"\n'
    tasks = TASKS.replace('if message.body == "hang"', 'if message.body == "hang" and message.deliveries == 1')
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.service.start(within=AS_PID_1)
        on.send("hang")
        on.service.wait_for_log("begins")
        first = eventually(lambda: child_of(on.service.pid), what="PID 1")
        os.kill(first, signal.SIGKILL)
        on.service.wait(10)
        on.service.start()
        on.until_empty(timeout_s=30)
        assert on.service.stop() == 0
        assert on.archived() == [("hang", 2)]


def test_a_reload_of_broken_code_changes_nothing_and_the_mended_code_comes_at_once(
    tmp_path: Path, database: str
) -> None:
    """Each broken deploy is reported with its reason, the old children stay; HUP during the drain does nothing."""
    tasks = 'VERSION = "one"\ndef handle(message):\n    print("runs", VERSION, flush=True)\n'
    broken = {
        "raise RuntimeError('bad deploy')": "bad deploy",
        "def other(message): ...": "has no 'handle'",
        "def handle(): ...": "positional",
        "import os\nos._exit(3)": "exit code 3",
        "def (": "SyntaxError",
    }
    with stage(tmp_path, database, CONFIG, tasks) as on:
        on.create()
        on.service.start()
        eventually(lambda: len(on.events("child.ready")) == 2, timeout_s=30, what="the children")
        before = {event["pid"] for event in on.events("child.ready")}
        for number, (source, said) in enumerate(broken.items(), 1):
            (tmp_path / "tasks.py").write_text(source + "\n")
            on.service.signal(signal.SIGHUP)
            eventually(lambda n=number: len(on.events("reload.ended")) == n, timeout_s=20, what="the report")
            assert said in on.events("reload.ended")[-1]["failed"]
            assert all(Path(f"/proc/{pid}").exists() for pid in before)
        on.send(1, 2, 3, 4)
        on.until_empty()
        (tmp_path / "tasks.py").write_text(tasks.replace("one", "two"))
        asked = time.monotonic()
        on.service.signal(signal.SIGHUP)
        eventually(lambda: len(on.events("reload.ended")) == len(broken) + 1, timeout_s=20, what="the reload")
        assert time.monotonic() - asked < 10
        assert "failed" not in on.events("reload.ended")[-1] or on.events("reload.ended")[-1]["failed"] is None
        on.send(5, 6)
        on.until_empty()
        on.service.signal(signal.SIGTERM)
        on.service.signal(signal.SIGHUP)
        assert on.service.wait() == 0
        assert [event["line"] for event in on.events("child.output")] == ["runs one"] * 4 + ["runs two"] * 2


APPLICATION = """
import shared, child, supervisor
from shared.deep import name
def handle(message, tx=None):
    import child.deep, supervisor.deep
    if tx is not None:
        tx.execute("SELECT 1")
    print("mine", shared.MINE, child.deep.name(), supervisor.deep.name(), name(), flush=True)
"""


@pytest.mark.parametrize("mode", ["regular", "transactional"])
@pytest.mark.parametrize("where", ["cwd", "app-dir", "pythonpath"])
def test_an_application_may_have_packages_of_all_our_names(
    tmp_path: Path, database: str, where: str, mode: str
) -> None:
    """By the console script, from its own folder, by --app-dir, and with its folder on PYTHONPATH."""
    app = tmp_path / "app"
    for name in ("shared", "child", "supervisor"):
        (app / name).mkdir(parents=True)
        (app / name / "__init__.py").write_text(f"MINE = {name!r}\n")
        (app / name / "__main__.py").write_text("raise SystemExit('the application was started')\n")
        (app / name / "deep.py").write_text(f"from {name} import MINE\ndef name(): return MINE\n")
    (app / "tasks.py").write_text(APPLICATION)
    with stage(tmp_path, database, CONFIG + f'mode = "{mode}"\n', "") as on:
        (tmp_path / "tasks.py").unlink()
        on.create()
        on.send(1)
        start(on, app, where)
        on.until_empty(timeout_s=30)
        assert on.service.stop() == 0, on.service.log
        assert [event["line"] for event in on.events("child.output")] == ["mine shared child supervisor shared"]


def start(on: Stage, app: Path, where: str) -> None:
    """The console script, as an operator would call it."""
    script = Path(sys.executable).with_name("pgmq-supervisor")
    environment = {**os.environ, "SUPERVISOR_DSN": on.service.dsn}
    if where == "pythonpath":
        environment["PYTHONPATH"] = str(app)
    arguments = [] if where == "cwd" else ["--app-dir", str(app)]
    with on.service.log_file.open("wb") as log:
        on.service._process = subprocess.Popen(
            [str(script), "run", "--config", str(on.service.config), *arguments],
            cwd=app if where == "cwd" else on.service.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

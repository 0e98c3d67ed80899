"""What handlers and imports leave behind, seen from outside: gone in a second, counted, and no zombie stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.running import Stage, stage
from tests.support.waiting import eventually

CONFIG = """
[http]
port = 0
[queues.jobs]
handler = "tasks:handle"
concurrency = 3
max_deaths = 1
hard_timeout = "1s"
on_success = "archive"
"""

TASKS = """
import os, signal, subprocess, sys, time
TAG = "3600.{tag}"
LEVEL = "import os, subprocess, sys, time; os.setpgid(0, 0); subprocess.Popen(sys.argv[1:], process_group=0)"
LEVEL += "; time.sleep(3600)"
WAYS = {{
    "plain": lambda: subprocess.Popen(["sleep", TAG]),
    "setsid": lambda: subprocess.Popen(["sleep", TAG], start_new_session=True),
    "nohup": lambda: subprocess.run(["sh", "-c", f"nohup sleep {{TAG}} >/dev/null 2>&1 & exit 0"]),
    "double fork": lambda: subprocess.run(["setsid", "sh", "-c", f"sleep {{TAG}} & exit 0"]),
    "three levels": lambda: subprocess.Popen([sys.executable, "-c", LEVEL, sys.executable, "-c", LEVEL, "sleep", TAG]),
    "deaf": lambda: subprocess.Popen(["sh", "-c", f"trap '' TERM INT HUP; while :; do sleep {{TAG}}; done"]),
    "stopped": lambda: subprocess.Popen(["sleep", TAG], start_new_session=True).send_signal(signal.SIGSTOP),
    "cleared": lambda: subprocess.run(["env", "-i", "setsid", "sh", "-c", f"sleep {{TAG}} & exit 0"]),
}}
def handle(message):
    way, end = message.body
    WAYS[way]()
    match end:
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "hang": time.sleep(3600)
        case "raise": raise message.dead_letter("asked for")
"""

WAYS = ("plain", "setsid", "nohup", "double fork", "three levels", "deaf", "stopped", "cleared")


def running(tag: str) -> list[int]:
    """Processes that have the tag in their command line and are no zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and tag in (folder / "cmdline").read_text() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def swept(on: Stage) -> float:
    """The counter, as a scrape shows it."""
    connection = HTTPConnection("127.0.0.1", on.events("http")[0]["port"], timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    [line] = [line for line in text.splitlines() if line.startswith("pgmq_supervisor_processes_swept_total{")]
    return float(line.split()[1])


@pytest.mark.parametrize("end", ["kill", "hang", "return", "raise"])
def test_left_overs_are_gone_within_a_second_and_counted(tmp_path: Path, database: str, end: str) -> None:
    """Eight ways to leave a process behind, after a kill and after a normal end too; no zombie stays."""
    tag = f"{os.getpid()}{len(end)}"
    with stage(tmp_path, database, CONFIG, TASKS.format(tag=tag)) as on:
        on.create()
        on.service.start()
        for way in WAYS:
            on.send([way, end])
        on.until_empty()
        eventually(lambda: not running(f"3600.{tag}"), timeout_s=1.5, what="the end of all left-overs")
        eventually(lambda: swept(on) >= len(WAYS), timeout_s=5, what="the count")
        states = subprocess.run(["ps", "-o", "stat=", "--ppid", str(on.service.pid)], capture_output=True, check=True)
        assert b"Z" not in states.stdout
        assert on.service.stop() == 0


def test_trials_of_handlers_leave_nothing(tmp_path: Path, database: str) -> None:
    """`check`, and the look at handlers before a start, import modules that start daemons of every kind."""
    tag = f"3601.{os.getpid()}"
    config = ""
    for number, start in enumerate(
        (
            f"subprocess.Popen(['sleep', '{tag}'], start_new_session=True)",
            f"subprocess.run(['setsid', 'sh', '-c', 'sleep {tag} & exit 0'])",
            f"subprocess.run(['env', '-i', 'setsid', 'sh', '-c', 'sleep {tag} & exit 0'])",
        )
    ):
        source = f"import subprocess\nhelper = {start}\ndef handle(message): ...\n"
        (tmp_path / f"starts{number}.py").write_text(source)
        config += f'[queues.q{number}]\nhandler = "starts{number}:handle"\n'
    with stage(tmp_path, database, config, "") as on:
        checked = subprocess.run(
            [sys.executable, "-m", "supervisor", "check", "--config", str(on.service.config), "--dsn", database],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert checked.stdout.count("imports, ") == 3, checked.stdout + checked.stderr
        assert not running(tag)
        on.service.start()
        eventually(lambda: len(on.events("child.ready")) == 3, timeout_s=30, what="the children")
        assert len(running(tag)) == 3  # those of the children; they belong to the modules
        assert on.service.stop() == 0
        assert not running(tag)


def test_what_a_dead_pair_left_is_swept_by_the_next_start(tmp_path: Path, database: str) -> None:
    """Guard and supervisor killed together while a daemon runs: found by its mark."""
    tag = f"{os.getpid()}7"
    config = CONFIG.replace('hard_timeout = "1s"', 'visibility_timeout = "2s"')
    with stage(tmp_path, database, config, TASKS.format(tag=tag)) as on:
        on.create()
        on.service.start()
        on.send(["setsid", "hang"])
        eventually(lambda: running(f"3600.{tag}"), timeout_s=30, what="the daemon")
        guard = next(
            int(pid)
            for pid in Path(f"/proc/{on.service.pid}/task/{on.service.pid}/children").read_text().split()
            if "guard_main" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(on.service.pid, signal.SIGSTOP)
        os.kill(guard, signal.SIGKILL)
        on.service.kill()
        assert running(f"3600.{tag}")
        on.rows("DELETE FROM pgmq.q_jobs RETURNING 1")
        on.service.start()
        eventually(lambda: not running(f"3600.{tag}"), timeout_s=30, what="the sweep at the start")
        assert on.service.stop() == 0

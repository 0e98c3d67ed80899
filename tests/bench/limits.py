"""Limits kept: what is set, and when what broke it was gone. Through the real service; docs/limits.md shows a run.

Every row is one kind of limit with one way to break it, some of them several times. The time is the parent's: from the
start of the handler to the moment at which the death of its child is settled.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench import harness
from tests.support.running import Stage, stage
from tests.support.waiting import eventually

_CONFIG: Final = """
[shutdown]
grace = "2s"
kill_after = "2s"
[queues.jobs]
handler = "tasks:handle"
max_deaths = 1
visibility_timeout = "5s"
{limit}
"""

_TASKS: Final = """
import os, re, signal, socket, subprocess, sys, threading, time
def handle(message):
    if message.deliveries == 1:
        print("begins", flush=True)
        exec(message.body, {**globals(), "message": message})
"""

_DEAF: Final = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try: time.sleep(3600)
    except BaseException: pass
"""

_EAT: Final = "hoard = []\nwhile True:\n    hoard.append(bytearray(b'x') * (4 << 20)); time.sleep(0.01)"


@dataclass(frozen=True, slots=True)
class Case:
    """`expected_s` None: there is no time to be kept, only an amount."""

    what: str
    limit: str
    body: str
    expected_s: float | None
    cause: str


HARD: Final = 'hard_timeout = "2s"'
CASES: Final = (
    Case("time.sleep", HARD, "time.sleep(3600)", 2.0, "hard_timeout"),
    Case("ignores TERM and every exception", HARD, _DEAF, 2.0, "hard_timeout"),
    Case(
        "blocks all signals",
        HARD,
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(3600)",
        2.0,
        "hard_timeout",
    ),
    Case("regular expression, holds the interpreter", HARD, "re.match(r'(a+)+$', 'a' * 64 + 'b')", 2.0, "hard_timeout"),
    Case(
        "lock that nobody opens", HARD, "lock = threading.Lock(); lock.acquire(); lock.acquire()", 2.0, "hard_timeout"
    ),
    Case("socket that nobody writes to", HARD, "ours, theirs = socket.socketpair(); ours.recv(1)", 2.0, "hard_timeout"),
    Case("spins in Python", HARD, "while True: pass", 2.0, "hard_timeout"),
    Case("SIGSTOP to itself", HARD, "os.kill(os.getpid(), signal.SIGSTOP)", 2.0, "hard_timeout"),
    Case("allocates without end", 'memory_limit = "150MB"', _EAT, None, "memory_limit"),
    Case(
        "a helper allocates without end",
        'memory_limit = "150MB"',
        f"subprocess.run([sys.executable, '-c', {'import time' + chr(10) + _EAT!r}])",
        None,
        "memory_limit",
    ),
)


def _folder_stage(dsn: str, limit: str, use: Callable[[Stage], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="limits-") as folder:
        Path(folder).chmod(0o755)
        with stage(Path(folder), dsn, _CONFIG.format(limit=limit), _TASKS) as on:
            on.create()
            on.service.start()
            on.service.wait_for_log("child.ready")
            return use(on)


def _case(dsn: str, case: Case, rounds: int) -> dict[str, Any]:
    def use(on: Stage) -> dict[str, Any]:
        on.send(*[case.body] * rounds)
        on.until_empty(timeout_s=60)
        on.service.stop()
        letters = on.letters()
        causes = {letter["death"]["cause"] for letter in letters}
        assert (len(letters), causes) == (rounds, {case.cause}), letters
        took = sorted(event["handler_s"] for event in on.events("message.dead_lettered"))
        row: dict[str, Any] = {"limit": case.limit, "rounds": rounds, "cause": case.cause}
        if case.expected_s is None:
            row["peak_mb"] = max(letter["death"]["max_rss_kb"] for letter in letters) // 1024
            row["gone_after_s"] = [round(took[0], 2), round(took[-1], 2)]
        else:
            row["gone_after_s"] = [round(took[0], 3), round(took[-1], 3)]
            row["kept"] = case.expected_s <= took[0] and took[-1] <= case.expected_s + 0.5
        return row

    return _folder_stage(dsn, case.limit, use)


def _shutdown(dsn: str) -> dict[str, Any]:
    """Against a handler that ignores everything: gone within grace and kill_after, 2 s each."""

    def use(on: Stage) -> dict[str, Any]:
        on.send(_DEAF)
        eventually(lambda: on.events("child.output"), timeout_s=30, what="the handler")
        asked = time.monotonic()
        code = on.service.stop()
        took = time.monotonic() - asked
        return {
            "limit": "grace = 2s, kill_after = 2s",
            "rounds": 1,
            "cause": "shutdown",
            "gone_after_s": [round(took, 3), round(took, 3)],
            "kept": 2.0 <= took <= 4.5 and code == 3,
        }

    return _folder_stage(dsn, HARD.replace("2s", "10m"), use)


def _frozen(dsn: str) -> dict[str, Any]:
    """A supervisor that stands still beyond its leases: the guard's kill, after the last renewal."""

    def use(on: Stage) -> dict[str, Any]:
        on.send("print('pid', os.getpid(), flush=True); time.sleep(3600)")
        eventually(lambda: len(on.events("child.output")) == 2, timeout_s=30, what="the handler")
        child = Path("/proc") / on.events("child.output")[1]["line"].split()[1] / "stat"
        on.service.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        eventually(lambda: child.read_text().rpartition(")")[2].split()[0] in "ZX", timeout_s=10, what="its end")
        took = time.monotonic() - stopped
        on.service.kill()
        return {
            "limit": "visibility_timeout = 5s",
            "rounds": 1,
            "cause": "lease_lost",
            "gone_after_s": [round(took, 3), round(took, 3)],
            "kept": took <= 5.5,
        }

    return _folder_stage(dsn, HARD.replace("2s", "10m"), use)


def _killed(dsn: str) -> dict[str, Any]:
    """SIGKILL of the supervisor while a child and its daemon run."""

    def use(on: Stage) -> dict[str, Any]:
        on.send(
            "daemon = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
            "print('pids', os.getpid(), daemon.pid, flush=True)\nre.match(r'(a+)+$', 'a' * 64 + 'b')"
        )
        eventually(lambda: len(on.events("child.output")) == 2, timeout_s=30, what="the handler")
        pids = on.events("child.output")[1]["line"].split()[1:]
        on.service.kill()
        killed = time.monotonic()
        eventually(lambda: not any(map(_alive, pids)), timeout_s=10, what="the end of child and daemon")
        took = time.monotonic() - killed
        return {
            "limit": "1 s after a SIGKILL of the supervisor",
            "rounds": 1,
            "cause": "none: nobody is left to say it",
            "gone_after_s": [round(took, 3), round(took, 3)],
            "kept": took <= 1.0,
        }

    return _folder_stage(dsn, HARD.replace("2s", "10m"), use)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run(server_dsn: str, *, rounds: int) -> dict[str, Any]:
    """All rows, by what breaks the limit."""
    results: dict[str, Any] = {}
    for case in CASES:
        with harness.queue(server_dsn) as (dsn, _):
            results[case.what] = _case(dsn, case, rounds if case.expected_s else 1)
    for what, measure in (
        ("grace period: ignores everything", _shutdown),
        ("lease: the supervisor is frozen", _frozen),
        ("left-overs: the supervisor is killed", _killed),
    ):
        with harness.queue(server_dsn) as (dsn, _):
            results[what] = measure(dsn)
    return results


def to_markdown(results: dict[str, Any], head: dict[str, Any]) -> str:
    """The page docs/limits.md."""
    lines = [
        "# Limits kept",
        "",
        "What was set, and when what broke it was gone: fastest and slowest of the rounds, from the start of the",
        "handler to the end of its child. Written by `python -m tests.bench limits --limits-page docs/limits.md`;",
        "`make bench` measures again.",
        "",
        f"Run of {head['at']}, Python {head['python']}, {head['machine']}, {head['cpus']} CPUs shared with other work.",
        "",
        "| what breaks it | limit | cause | rounds | gone after | kept |",
        "|---|---|---|---|---|---|",
    ]
    for what, row in results.items():
        first, last = row["gone_after_s"]
        span = f"{first} s" if first == last else f"{first} to {last} s"
        kept = f"peak {row['peak_mb']} MB" if "peak_mb" in row else "yes" if row["kept"] else "**no**"
        lines.append(f"| {what} | `{row['limit']}` | {row['cause']} | {row['rounds']} | {span} | {kept} |")
    lines += [
        "",
        "A hard limit is kept within 0.5 s. The stack is written first; a child that cannot answer costs 150 ms.",
        "Memory is looked at ten times a second, so a fast allocation is over its limit for a moment. What a helper",
        "holds counts; the peak is the child's own.",
        "",
        "```json",
        json.dumps(results, indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)

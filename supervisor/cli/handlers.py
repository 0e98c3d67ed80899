"""Whether handlers can be loaded, found out in throw-away children: the parent never imports the application."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.clock import boottime
from shared.sizes import format_size
from supervisor.config import Config
from supervisor.processes import marks, procfs
from supervisor.processes.spec import OOM_SCORE_ADJ
from supervisor.processes.stamps import Stamps
from supervisor.processes.sweeper import Sweeper, adopt_orphans

__all__ = ["HandlerReport", "Verdict", "memory_complaints", "try_handlers"]

_CHILD = Path(__file__).resolve().parents[2] / "child" / "__main__.py"
_RESULT_LIMIT = 1 << 20
_AT_ONCE = 4
_SWEEP_LIMIT_S = 1.0


class Verdict(StrEnum):
    """What is known of a handler."""

    GOOD = "good"
    UNUSABLE = "unusable"  # does not exist, is not callable, wrong arity: no retry will mend it
    FAILED = "failed"  # its import raised or ended the process: the queue will be parked and retried
    UNDECIDED = "undecided"  # still importing when the time was over


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerReport:
    """One handler, for every queue that uses it in this mode."""

    handler: str
    mode: str
    queues: tuple[str, ...]
    verdict: Verdict
    reason: str = ""
    traceback: str = ""
    rss_bytes: int = 0  # of a child after its imports, where it got so far


@dataclass(slots=True)
class _Trial:
    handler: str
    mode: str
    queues: tuple[str, ...]
    number: int
    process: subprocess.Popen[bytes]
    result_fd: int
    deadline: float
    result: bytes = b""


class _Broom:
    """What an import started in a session of its own is not in the group of its trial: it is found by its mark."""

    def __init__(self) -> None:
        self._owner = marks.owner_of_this_process("check")
        self._trials: dict[int, int] = {}
        self._stamps = Stamps()
        self._sweeper = Sweeper(
            owner=self._owner,
            clock=boottime,
            leader_of=self._trials.get,
            is_own=lambda _pid: False,
            child_oom_score_adj=(OOM_SCORE_ADJ,),
            stamp_of=self._stamps.read,
        )

    def mark(self, number: int) -> str:
        """For the environment of a trial."""
        return marks.make(self._owner, number)

    def watch(self, trial: _Trial) -> None:
        """It runs, and is marked also for the case that something of it clears its environment."""
        procfs.raise_oom_score_adj(trial.process.pid, OOM_SCORE_ADJ)
        self._stamps.put(trial.process.pid, trial.number)
        self._trials[trial.process.pid] = trial.number

    def sweep(self, trial: _Trial) -> None:
        """It is reaped: kill what it left until nothing is left, at most a second."""
        give_up = time.monotonic() + _SWEEP_LIMIT_S
        while self._sweeper.sweep_child(trial.number, may_be_in_use=lambda _orphan: False):
            if time.monotonic() > give_up:
                break
            time.sleep(0.005)
        self._trials.pop(trial.process.pid, None)


def try_handlers(config: Config, *, timeout_s: float) -> list[HandlerReport]:
    """Load every handler of the configuration once, a few at a time, each for at most `timeout_s` seconds."""
    users: dict[tuple[str, str], list[str]] = {}
    for name, queue in config.queues.items():
        users.setdefault((queue.handler, queue.mode.value), []).append(name)
    waiting = [(handler, mode, tuple(names)) for (handler, mode), names in users.items()]
    reports: list[HandlerReport] = []
    running: list[_Trial] = []
    adopt_orphans()
    broom = _Broom()
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number = len(reports) + len(running) + 1
                trial = _begin(number, *waiting.pop(0), app_dir=config.app_dir, broom=broom, timeout_s=timeout_s)
                running.append(trial)
            for trial in list(_ended(running)):
                running.remove(trial)
                reports.append(_judge(trial, timeout_s))
                broom.sweep(trial)
    finally:
        for trial in running:
            _end(trial)
            broom.sweep(trial)
        adopt_orphans(on=False)
    order = {(handler, mode): number for number, (handler, mode) in enumerate(users)}
    return sorted(reports, key=lambda report: order[report.handler, report.mode])


def memory_complaints(config: Config, reports: Iterable[HandlerReport]) -> Iterator[tuple[str, str]]:
    """Give queue and reason where a child is larger than its memory_limit before it has handled anything."""
    for report in reports:
        for name in report.queues:
            limit = config.queues[name].memory_limit
            if limit is not None and report.rss_bytes > limit:
                least, most = format_size(report.rss_bytes), format_size(limit)
                yield name, f"memory_limit ({most}) is below what a child has after its imports ({least})"


def _begin(
    number: int, handler: str, mode: str, queues: tuple[str, ...], *, app_dir: Path, broom: _Broom, timeout_s: float
) -> _Trial:
    """Start a child as the supervisor would, with a pipe for its answer."""
    result_fd, child_end = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", str(_CHILD), "--check", handler, mode, str(app_dir), str(child_end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(child_end,),
            process_group=0,
            env={**os.environ, marks.VARIABLE: broom.mark(number)},
        )
    except OSError:
        os.close(result_fd)
        raise
    finally:
        os.close(child_end)
    trial = _Trial(handler, mode, queues, number, process, result_fd, time.monotonic() + timeout_s)
    broom.watch(trial)
    return trial


def _ended(running: list[_Trial]) -> Iterator[_Trial]:
    """Wait a moment; give those that have answered, have ended, or are out of time.

    A whole line is an answer. The end of the pipe alone is not waited for: what an import started may hold it open.
    """
    readable, _, _ = select.select([trial.result_fd for trial in running], [], [], 0.05)
    for trial in running:
        if trial.result_fd in readable:
            trial.result += os.read(trial.result_fd, 65536)
        answered = b"\n" in trial.result or len(trial.result) > _RESULT_LIMIT
        if answered or _has_ended(trial.process) or time.monotonic() > trial.deadline:
            yield trial


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Look without reaping: while the leader is a zombie its process group cannot be anybody else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(trial: _Trial) -> int:
    """Kill what the trial started, reap it, and close its pipe. Gives the exit status of the leader."""
    dead = _has_ended(trial.process)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(trial.process.pid, signal.SIGKILL)
    with contextlib.suppress(BlockingIOError, OSError):
        os.set_blocking(trial.result_fd, False)
        while dead and len(trial.result) <= _RESULT_LIMIT and (more := os.read(trial.result_fd, 65536)):
            trial.result += more
    os.close(trial.result_fd)
    return trial.process.wait()


def _judge(trial: _Trial, timeout_s: float) -> HandlerReport:
    late = time.monotonic() > trial.deadline and not _has_ended(trial.process)
    status = _end(trial)

    def report(verdict: Verdict, reason: str = "", traceback: str = "", rss_kb: int = 0) -> HandlerReport:
        return HandlerReport(
            handler=trial.handler,
            mode=trial.mode,
            queues=trial.queues,
            verdict=verdict,
            reason=reason,
            traceback=traceback,
            rss_bytes=rss_kb << 10,
        )

    answer = _answer(trial.result.split(b"\n", 1))
    if answer is None:
        if late:
            return report(Verdict.UNDECIDED, f"still importing after {timeout_s:g} s")
        return report(
            Verdict.FAILED, f"importing {trial.handler.partition(':')[0]} ended the process: {_status(status)}"
        )
    if answer.get("ok"):
        rss_kb = answer.get("rss_kb")
        return report(Verdict.GOOD, rss_kb=rss_kb if isinstance(rss_kb, int) else 0)
    verdict = Verdict.FAILED if answer.get("kind") == "import" else Verdict.UNUSABLE
    return report(verdict, str(answer.get("error") or ""), str(answer.get("traceback") or ""))


def _answer(lines: Iterable[bytes]) -> dict[str, object] | None:
    """Read the child's line; None where it did not write a whole one."""
    line, *rest = lines
    if not rest:
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _status(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"

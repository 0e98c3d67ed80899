"""Mode *random*: seeded kills of children, parent, guard, sessions, backends and PostgreSQL itself, under load.

What was killed is started again, as a service manager would do; in the end everything must have come to its end, once.
"""

from __future__ import annotations

import contextlib
import queue as queues
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psycopg

from crashtests.checker import Allowed, Finding, Verdict, check, count_repeats, worst
from crashtests.generator import CONCURRENCY, Fault, FaultKind, Story, tell_story
from crashtests.ground import Ground, ground
from crashtests.processes import Process, wait_until
from crashtests.scene import LEASE_S, TRANSACTIONAL, Scene, scene, usual_queues
from crashtests.stage import Stage

__all__ = ["RandomRun", "run_random", "run_story"]

_BEGIN_S: Final = 60.0
_END_S: Final = 120.0
_GONE_S: Final = 10.0
_AGAIN_S: Final = 0.5  # a supervisor that ended by itself is started again not faster than this
_SERVER_SIGNALS: Final = {FaultKind.POSTGRES: signal.SIGQUIT, FaultKind.POSTMASTER: signal.SIGKILL}
_BACKENDS: Final = frozenset({FaultKind.SESSION, FaultKind.BACKEND})
_MANY: Final = "1000"  # attempts and deaths: here nothing deserves a dead letter


@dataclass(frozen=True, slots=True)
class RandomRun:
    """One story, lived through once."""

    story: Story
    verdict: Verdict
    messages: int
    repeats: int
    starts: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    log: str = ""


def run_random(
    seeds: Sequence[int],
    *,
    workers: int = 2,
    seconds: float | None = None,
    tell: Callable[[RandomRun], None] = lambda _: None,
) -> list[RandomRun]:
    """Live through the story of each seed; each worker has a PostgreSQL server of its own, as that is killed too.

    After `seconds` no further story is begun: those that were are the first ones of `seeds`.
    """
    began = time.monotonic()
    todo: queues.SimpleQueue[int] = queues.SimpleQueue()
    for seed in seeds:
        todo.put(seed)

    def work(_worker: int) -> list[RandomRun]:
        done: list[RandomRun] = []
        with ground() as place, contextlib.suppress(queues.Empty):
            while seconds is None or time.monotonic() - began < seconds:
                done.append(run_story(place, tell_story(todo.get_nowait())))
                tell(done[-1])
        return done

    count = min(workers, len(seeds))
    with ThreadPoolExecutor(max_workers=count or 1) as pool:
        return sorted((run for runs in pool.map(work, range(count)) for run in runs), key=lambda run: run.story.seed)


def run_story(place: Ground, story: Story) -> RandomRun:
    """One run."""
    began = time.monotonic()
    options = {"max_attempts": _MANY, "max_deaths": _MANY, "concurrency": str(CONCURRENCY)}
    with place.database() as dsn, scene(dsn, usual_queues(**options), with_points=False) as stand:
        try:
            _live_through(place, stand, story)
            truth = stand.truth(stand.stage.stop())
        except (psycopg.Error, OSError, TimeoutError) as error:
            found = (Finding(Verdict.UNKNOWN, "scenario", repr(error)),)
            return RandomRun(story, Verdict.UNKNOWN, 0, 0, 0, time.monotonic() - began, found, stand.stage.log_tail())
        allowed = Allowed(frozenset({TRANSACTIONAL}), repeats=story.repeats, overlaps=story.loses_sessions)
        findings = tuple(check(truth, allowed))
        verdict = worst(findings)
        log = "" if verdict is Verdict.OK else stand.stage.log_tail()
        starts = stand.stage.starts
        return RandomRun(
            story, verdict, len(truth.sent), count_repeats(truth), starts, time.monotonic() - began, findings, log
        )


def _live_through(place: Ground, stand: Scene, story: Story) -> None:
    stand.create_queues()
    for work in story.works:
        stand.send(work.queue, work.op, **work.body)
    stand.stage.start()
    wait_until(stand.ledger.exists, _BEGIN_S)
    began = time.monotonic()
    for fault in story.faults:
        _keep_running(stand, until=began + fault.at_s)
        _commit(place, stand, fault)
    if place.server is not None:
        place.server.start()
    end = time.monotonic() + _END_S
    while not stand.wait_ended(stand.sent, 0.0) and time.monotonic() < end:
        _keep_running(stand, until=time.monotonic() + 0.1)
    _keep_running(stand, until=0.0)
    if not wait_until(lambda: len(stand.stage.children()) == 2 * CONCURRENCY, _BEGIN_S):  # it can be stopped in order
        raise TimeoutError(f"{len(stand.stage.children())} children at the end")


def _keep_running(stand: Scene, *, until: float) -> None:
    """Wait; start the supervisor again where it ended by itself: without a database it gives up, as it should."""
    while True:
        if not stand.stage.running:
            stand.stage.start()
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _AGAIN_S))


def _commit(place: Ground, stand: Scene, fault: Fault) -> None:
    """Do it, and start again what a service manager would start again."""
    if fault.kind in _SERVER_SIGNALS:
        _end_server(place, _SERVER_SIGNALS[fault.kind])
    elif fault.kind in _BACKENDS:
        with contextlib.suppress(psycopg.OperationalError):  # the server is down already
            _end_a_session(stand, fault)
    else:
        _trouble_supervisor(stand.stage, fault)
    time.sleep(fault.pause_s)
    if place.server is not None:
        place.server.start()


def _trouble_supervisor(stage: Stage, fault: Fault) -> None:
    match fault.kind:
        case FaultKind.CHILD:
            _kill(_some(stage.children(), fault.pick))
        case FaultKind.CHILDREN:
            _kill(stage.children())
        case FaultKind.GUARD:
            _kill(stage.guards())
        case FaultKind.PARENT:
            _kill_parent(stage)
        case FaultKind.PARENT_AND_GUARD:
            guards = stage.guards()
            stage.parent.freeze()
            _kill(guards)
            _kill_parent(stage)
        case FaultKind.DEPLOY:
            stage.stop()
        case _:
            stage.parent.freeze()
            time.sleep(LEASE_S * 1.5)
            stage.parent.thaw()


def _kill_parent(stage: Stage) -> None:
    """And see it dead: what still looks alive would not be started again."""
    stage.parent.kill()
    stage.parent.wait_gone(_GONE_S)


def _some(pids: list[int], pick: float) -> list[int]:
    return [pids[int(pick * len(pids))]] if pids else []


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError), contextlib.closing(Process(pid)) as process:
            process.kill()


def _end_a_session(stand: Scene, fault: Fault) -> None:
    """One of the supervisor's: ended in order by its server, or its backend killed, which restarts the server."""
    found = stand.session().execute(
        "select pid from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and backend_type = 'client backend' order by backend_start, pid"
    )
    chosen = _some([pid for (pid,) in found], fault.pick)
    if fault.kind is FaultKind.BACKEND:
        _kill(chosen)
        return
    for pid in chosen:
        stand.session().execute("select pg_terminate_backend(%s)", [pid])


def _end_server(place: Ground, number: signal.Signals) -> None:
    assert place.server is not None, "somebody else's server is not killed"
    with (
        contextlib.suppress(ProcessLookupError),
        contextlib.closing(Process(place.server.postmaster_pid)) as postmaster,
    ):
        postmaster.signal(number)
        postmaster.wait_gone(30.0)

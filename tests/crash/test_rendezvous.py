"""The harness's side of a sync point, its nemesis and its proxy, each without a supervisor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from crashtests.ground import Ground, private_folder
from crashtests.nemesis import Order, Victim, struck
from crashtests.processes import Process, marked
from crashtests.proxy import Proxy, What
from crashtests.rendezvous import NotReached, Rendezvous
from shared import syncpoints

COMES = """
import sys
from shared import syncpoints
syncpoints.switch_on_if_asked("child")
for point in sys.argv[1:]:
    syncpoints.hit(point, {"msg_id": 7})
    print(point, flush=True)
"""


@pytest.fixture
def points() -> Iterator[Rendezvous]:
    """A rendezvous in a folder of its own."""
    with private_folder("test") as folder, contextlib.closing(Rendezvous(folder)) as made:
        yield made


def visitor(points: Rendezvous, *names: str, armed: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that goes from point to point."""
    return subprocess.Popen(
        [sys.executable, "-c", COMES, *names],
        env={**os.environ, **points.environ(armed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )


def said(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code and what it had got past."""
    out, _ = process.communicate(timeout=30)
    return process.returncode, out.split()


def test_nobody_waited_for_nobody_held(points: Rendezvous) -> None:
    """Without a trap a process goes on, and its visits are written down."""
    assert said(visitor(points, "child.handler.before", "child.handler.after"))[0] == 0
    assert [(c.process, c.point, c.visit, c.ids) for c in points.crossings] == [
        ("child", "child.handler.before", 1, {"msg_id": 7}),
        ("child", "child.handler.after", 1, {"msg_id": 7}),
    ]


def test_the_nth_visitor_stands_still_until_it_is_killed(points: Rendezvous) -> None:
    """It got past what came before the point and to nothing that comes behind it."""
    trap = points.trap("child.handler.before", nth=2)
    process = visitor(points, "child.handler.before", "child.handler.before", "child.handler.after")
    with contextlib.closing(trap.wait(30)) as meeting:
        assert meeting.crossing.visit == 2
        assert process.poll() is None
        meeting.process.kill()
        assert meeting.process.wait_gone(10)
    assert said(process) == (-9, ["child.handler.before"])


def test_a_meeting_may_be_answered_in_four_ways(points: Rendezvous) -> None:
    """Go on, sleep, raise, exit."""
    traps = [points.trap("child.handler.before", nth=n) for n in (1, 2, 3)]
    last = points.trap("child.handler.after")
    process = visitor(points, *["child.handler.before"] * 2, "child.handler.after")
    traps[0].wait(30).release()
    traps[1].wait(30).pause(0.01)
    last.wait(30).exit(9)
    assert said(process) == (9, ["child.handler.before"] * 2)
    raising = visitor(points, "child.handler.before")
    traps[2].wait(30).fail("as the test asks")
    assert said(raising) == (1, [])


def test_a_trap_may_look_at_the_message(points: Rendezvous) -> None:
    """Only the message that is meant is held."""
    trap = points.trap("child.handler.before", where=lambda crossing: crossing.ids["msg_id"] == 8)
    assert said(visitor(points, "child.handler.before"))[0] == 0
    with pytest.raises(NotReached):
        trap.wait(0.05)


def test_only_armed_points_come(points: Rendezvous) -> None:
    """The others cost no meeting."""
    armed = ("child.handler.after",)
    assert said(visitor(points, "child.handler.before", "child.handler.after", armed=armed))[0] == 0
    assert [crossing.point for crossing in points.crossings] == ["child.handler.after"]


def test_a_stranger_is_turned_away(points: Rendezvous) -> None:
    """Without the token nobody is met, and nobody is written down."""
    environ = {**points.environ(), syncpoints.TOKEN_VARIABLE: "0" * 32}
    done = subprocess.run(
        [sys.executable, "-c", COMES, "child.handler.before"], env={**os.environ, **environ}, check=True
    )
    assert done.returncode == 0
    assert points.crossings == []


def test_when_the_harness_ends_everybody_goes_on() -> None:
    """A harness that is gone holds nobody."""
    with private_folder("test") as folder:
        points = Rendezvous(folder)
        trap = points.trap("child.handler.before")
        process = visitor(points, "child.handler.before")
        trap.wait(30)
        points.close()
        assert said(process) == (0, ["child.handler.before"])


@pytest.mark.parametrize("victim", Victim)
@pytest.mark.parametrize("order", Order)
def test_who_is_struck_is_dead_and_nobody_else(victim: Victim, order: Order) -> None:
    """In either order; a parent that is spared stands still meanwhile, and goes on afterwards."""
    with contextlib.ExitStack() as stack:
        sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        for sleeper in sleepers:
            stack.callback(sleeper.wait)
            stack.callback(sleeper.kill)
        parent, child = (stack.enter_context(contextlib.closing(Process(sleeper.pid))) for sleeper in sleepers)
        with struck(victim, parent=parent, child=child, order=order):
            assert child.gone == (victim is not Victim.PARENT)
            assert parent.gone == (victim is not Victim.CHILD)
            state = Path(f"/proc/{parent.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state == ("T" if victim is Victim.CHILD else "Z")
        if victim is Victim.CHILD:
            assert Path(f"/proc/{parent.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


def test_marked_processes_are_found_whoever_started_them() -> None:
    """Also what a process has started and left behind."""
    environ = {**os.environ, "CRASHTESTS_TEST_MARK": "here"}
    script = "sleep 600 & echo $!; exec >&-; wait"
    with subprocess.Popen(["/bin/sh", "-c", script], env=environ, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        orphan = int(shell.stdout.readline())
        shell.kill()
        shell.wait()
        assert marked("CRASHTESTS_TEST_MARK", "here") == [orphan]
        assert marked("CRASHTESTS_TEST_MARK", "elsewhere") == []
        with contextlib.closing(Process(orphan)) as process:
            process.kill()
            assert process.wait_gone(10)


def test_a_swallowed_answer_is_done_and_a_withheld_question_is_not(crash_ground: Ground) -> None:
    """The client hears the same in both cases; the table knows."""
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(crash_ground.database())
        proxy = stack.enter_context(contextlib.closing(Proxy(dsn)))
        direct = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        direct.execute("create table t (n integer)")
        for number, what in enumerate((What.SWALLOW, What.WITHHOLD)):
            tripwire = proxy.tripwire("insert into t", what)
            with psycopg.connect(proxy.dsn, autocommit=True) as client, pytest.raises(psycopg.OperationalError):
                client.execute("insert into t values (%s)", [number])
            assert tripwire.wait(10)
        assert direct.execute("select array_agg(n) from t").fetchone() == ([0],)


def test_a_cut_and_a_freeze(crash_ground: Ground) -> None:
    """A cut ends the connections that there are, a freeze lasts until the thaw."""
    with crash_ground.database() as dsn, contextlib.closing(Proxy(dsn)) as proxy:
        with psycopg.connect(proxy.dsn, autocommit=True) as client:
            assert client.execute("select 1").fetchone() == (1,)
            assert proxy.cut() == 1
            with pytest.raises(psycopg.OperationalError):
                client.execute("select 1")
        with psycopg.connect(proxy.dsn, autocommit=True) as client, ThreadPoolExecutor(1) as pool:
            proxy.freeze()
            asked = pool.submit(client.execute, "select 1")
            with pytest.raises(TimeoutError):
                asked.result(0.1)
            proxy.thaw()
            assert asked.result(10).fetchone() == (1,)

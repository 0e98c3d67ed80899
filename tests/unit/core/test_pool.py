"""The children of a queue: start, spares, failures, parking, recycling, reload."""

from __future__ import annotations

import pytest

from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.settings import Timing
from supervisor.core.types import SUCCESS, ChildId, DeathCause
from tests.unit.core.stage import Q, Stage, facts, queue, row


def fail_boot(stage: Stage, child: ChildId, *, definite: bool = True) -> Stage:
    """The child ends before it is READY; `definite`: it says that its handler cannot be imported."""
    if definite:
        stage.tell(e.ChildBootFailed(child, "import", "No module named 'x'", "Traceback ..."))
        last = stage.last
        stage.die(child, exit_code=78)
        stage.last = last + stage.last
        return stage
    return stage.die(child)


def probe(stage: Stage, *, within_s: float = 120.0) -> ChildId:
    """Wait for the next start."""
    for _ in range(int(within_s / 0.1)):
        if stage.wait(0.1).all(c.StartChild):
            return stage.only(c.StartChild).child
    raise AssertionError("nothing is started")


# --- start ------------------------------------------------------------------------------------------------------------


def test_every_slot_gets_a_child() -> None:
    """Concurrency + standby processes, all at once."""
    stage = Stage(queue(concurrency=2, standby=1))
    started = stage.tell(e.Started()).all(c.StartChild)
    assert [(command.slot, command.incarnation) for command in started] == [(0, 0), (1, 0), (2, 0)]
    assert stage.ready().states() == ["idle"] * 3


def test_a_spare_is_a_ready_child_without_a_message() -> None:
    """Never more than `concurrency` messages in children; the spare stands in at once when one dies."""
    stage = Stage(queue(concurrency=1, standby=1)).start()
    dispatch = stage.run(row(1))
    assert stage.claiming is None
    stage.tell(e.Notified(Q))
    assert not stage.all(c.Claim)
    stage.die(dispatch.child)
    assert stage.all(c.Claim)
    assert stage.states() == ["idle", "starting"]


def test_a_killed_child_counts_until_it_is_gone() -> None:
    """With concurrency 1 no second message runs beside one whose kill is on its way, spare or not."""
    stage = Stage(queue(concurrency=1, standby=1, hard_timeout_s=1.0)).start()
    dispatch = stage.run(row(1))
    stage.wait(1.0)
    assert stage.all(c.KillChild)
    assert not stage.all(c.Claim)
    stage.die(dispatch.child, signal="SIGKILL")
    assert stage.all(c.Claim)


def test_what_is_told_of_a_child_that_is_forgotten_says_nothing() -> None:
    """Late events are no errors."""
    stage = Stage().start()
    child = ChildId(1)
    stage.die(child)
    for event in (
        e.ChildReady(child, 1),
        e.ChildSpawned(child, 1),
        e.SpawnFailed(child, "no"),
        e.ChildBootFailed(child, "import", "no", ""),
        e.ChildDied(child, facts()),
        e.ProtocolBroken(child, "no"),
        e.MemoryMeasured(child, 1),
    ):
        assert not stage.tell(event).last


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failed_starts_are_repeated_with_growing_pauses_and_one_at_a_time() -> None:
    """A bounded probe, not a stampede of interpreters."""
    stage = Stage(queue(concurrency=3), timing=Timing(boot_attempts=99))
    first, second, third = stage.tell(e.Started()).all(c.StartChild)
    fail_boot(stage, first.child, definite=False)
    assert stage.told(h.ChildFailedToStart)[0].error == "ended before it was READY: signal (SIGSEGV)"
    fail_boot(stage, second.child, definite=False)
    fail_boot(stage, third.child, definite=False)
    assert not stage.wait(0.3).all(c.StartChild)
    once_more = stage.wait(0.1).only(c.StartChild)
    fail_boot(stage, once_more.child, definite=False)
    assert not stage.wait(0.7).all(c.StartChild)
    again = stage.wait(0.1).only(c.StartChild)
    assert not stage.wait(5.0).all(c.StartChild)
    stage.tell(e.ChildReady(again.child, 1))
    assert len(stage.all(c.StartChild)) == 2


def test_all_children_killed_at_once_come_back_at_once() -> None:
    """`pkill -9` of every idle child is one event, and none of the handler's doing: no queue is parked."""
    stage = Stage(queue(concurrency=12)).start()
    for child in stage.children():
        stage.die(child, signal="SIGKILL")
    stage.wait(0.1)
    assert stage.states() == ["starting"] * 12
    stage.tell(*[e.ChildReady(child, 1) for child in stage.children()])
    assert stage.states() == ["idle"] * 12


@pytest.mark.parametrize("how", [{"exit_code": 3}, {"signal": "SIGSEGV"}])
def test_an_import_that_ends_its_process_parks_the_queue_soon(how: dict[str, object]) -> None:
    """As one that raises does: the third time it is believed."""
    stage = Stage()
    stage.tell(e.Started())
    stage.die(stage.children()[0], **how)
    for _ in range(2):
        assert stage.look().parked is None
        stage.die(probe(stage), **how)
    assert stage.look().parked is not None


def test_a_start_that_cannot_spawn_is_a_failed_one() -> None:
    """No processes left: told, and tried again."""
    stage = Stage()
    started = stage.tell(e.Started()).only(c.StartChild)
    stage.tell(e.SpawnFailed(started.child, "EAGAIN"))
    assert stage.told(h.ChildFailedToStart)[0].error == "cannot start a process: EAGAIN"
    assert stage.wait(1.0).all(c.StartChild)


def test_an_import_that_hangs_is_killed_with_its_stack() -> None:
    """The READY deadline."""
    stage = Stage()
    started = stage.tell(e.Started()).only(c.StartChild)
    stage.wait(59.9)
    assert not stage.all(c.KillChild)
    stage.wait(0.1)
    assert stage.only(c.KillChild) == c.KillChild(started.child, with_stack=True)
    assert not stage.tell(e.ChildReady(started.child, 1)).told(h.ChildBecameReady)
    stage.die(started.child, signal="SIGKILL")
    assert "not READY within 60 s" in stage.told(h.ChildFailedToStart)[0].error


def test_the_death_of_an_idle_child_counts_like_a_failed_start() -> None:
    """With its backoff; others go on."""
    stage = Stage(queue(concurrency=2)).start()
    stage.die(ChildId(1))
    assert stage.told(h.ChildFailedToStart)[0].error == "an idle child ended: signal (SIGSEGV)"
    assert not stage.all(c.StartChild)
    assert stage.wait(0.5).only(c.StartChild).slot == 0


# --- parking ----------------------------------------------------------------------------------------------------------


def parked() -> Stage:
    """Two queues; the handler of the first cannot be imported."""
    stage = Stage(queue("q"), queue("r"))
    stage.tell(e.Started())
    bad, good = stage.all(c.StartChild)
    stage.tell(e.ChildReady(good.child, 1))
    fail_boot(stage, bad.child)
    for _ in range(2):
        fail_boot(stage, probe(stage))
    return stage


def test_a_handler_that_cannot_be_imported_parks_its_queue() -> None:
    """After three starts in a row; the other queues go on."""
    stage = parked()
    (happening,) = stage.told(h.QueueParked)
    assert (happening.queue, happening.why) == ("q", "import: No module named 'x'")
    assert stage.look("q").parked == "import: No module named 'x'"
    assert stage.look("r").parked is None
    assert stage.core.snapshot(stage.now).state == "running"


def test_a_parked_queue_is_tried_again_and_unparked() -> None:
    """When a child becomes READY, all slots are filled."""
    stage = parked()
    child = probe(stage)
    fail_boot(stage, child)
    assert not stage.told(h.QueueParked)  # it still is
    stage.tell(e.ChildReady(probe(stage), 1))
    assert len(stage.told(h.QueueUnparked)) == 1
    assert stage.look("q").parked is None
    assert stage.all(c.Claim)


def test_when_every_queue_is_parked_the_supervisor_ends_with_1() -> None:
    """The supervisor gives up: its exit code is not 0."""
    stage = Stage()
    fail_boot(stage, stage.tell(e.Started()).only(c.StartChild).child)
    fail_boot(stage, probe(stage))
    fail_boot(stage, probe(stage))
    assert stage.only(c.Exit).code == 1


def test_children_that_work_keep_a_queue_from_being_parked() -> None:
    """A broken deploy while old children still run: they go on."""
    stage = Stage(queue(concurrency=2, visibility_timeout_s=3600.0)).start()
    dispatch = stage.run(row(1, lease_s=3600.0))
    stage.die(next(child for child in stage.children() if child != dispatch.child))
    for _ in range(12):
        fail_boot(stage, probe(stage))
    assert stage.look().parked is None


def test_too_many_idle_deaths_in_a_short_time_park_a_queue() -> None:
    """Children that become READY and end at once are no use either."""
    stage = Stage(timing=Timing(boot_backoff_max_s=1.0))
    stage.start()
    for number in range(8):
        stage.die(*stage.children())
        if number < 7:
            stage.tell(e.ChildReady(probe(stage), 1))
    assert len(stage.told(h.QueueParked)) == 1
    assert stage.give().only(c.Exit).code == 1


# --- recycling --------------------------------------------------------------------------------------------------------


def test_the_successor_of_a_worn_out_child_boots_during_its_last_message() -> None:
    """max_tasks_per_child: the old one goes when it is through, and takes nothing more."""
    stage = Stage(queue(max_tasks_per_child=2)).start()
    stage.finish(stage.run(row(1)))
    assert not stage.all(c.StartChild)
    dispatch = stage.give(row(2)).only(c.Dispatch)
    started = stage.only(c.StartChild)
    assert (started.slot, started.incarnation) == (0, 1)
    stage.ready()
    assert not stage.all(c.SendExit)
    stage.finish(dispatch)
    assert stage.only(c.SendExit).child == dispatch.child
    stage.die(dispatch.child, exit_code=0)
    assert stage.told(h.ChildEnded)[0].cause is DeathCause.RETIRED
    assert stage.states() == ["idle"]


def test_a_successor_boots_while_the_last_messages_are_handled() -> None:
    """It takes as long to start as some messages take: it is READY when the old one is through, and no work waits."""
    stage = Stage(queue(max_tasks_per_child=20))
    stage.tell(e.Started())
    stage.now += 1.0
    stage.ready()
    for handled in range(20):
        dispatch = stage.give(row(handled + 1)).only(c.Dispatch)
        if stage.all(c.StartChild):
            break
        stage.now += 0.2
        stage.finish(dispatch)
    assert 12 <= handled <= 17
    stage.ready()
    stage.finish(dispatch)
    assert stage.only(c.SendExit).child == dispatch.child
    assert stage.states() == ["exiting", "idle"]


def test_a_busy_child_gets_one_successor_and_not_one_after_the_other() -> None:
    """However long its last message takes."""
    stage = Stage(queue(max_tasks_per_child=1)).start()
    stage.give(row(1))
    stage.ready()
    assert not stage.all(c.StartChild)
    assert not stage.wait(4.0).all(c.StartChild)
    assert sorted(stage.states()) == ["busy", "idle"]


def test_children_that_started_together_do_not_wear_out_together() -> None:
    """The first generation gets fewer messages, slot by slot; later ones keep the distance."""
    stage = Stage(queue(concurrency=4, max_tasks_per_child=100)).start()
    limits = [child.max_messages for child in stage.core._queues[Q].pool.children.values()]
    assert limits == [100, 88, 75, 63]


def test_aged_children_are_replaced_one_by_one() -> None:
    """max_child_age with jitter: never more than one process beyond the pool's size."""
    stage = Stage(queue(concurrency=3, max_child_age_s=100.0)).start()
    stage.give()
    stage.wait(100.0)
    assert len(stage.all(c.StartChild)) == 1
    seen = 0
    while stage.all(c.StartChild):
        seen += 1
        stage.ready()
        old = stage.only(c.SendExit).child
        assert len(stage.states()) == 4
        stage.die(old, exit_code=0)
    assert seen == 3
    assert stage.states() == ["idle"] * 3


def test_a_child_that_ignores_its_exit_is_killed() -> None:
    """Endless non-daemon thread, slow atexit: the child still ends in bounded time."""
    stage = Stage(queue(max_child_age_s=10.0)).start()
    stage.wait(10.0)
    stage.ready()
    old = stage.only(c.SendExit).child
    stage.wait(5.0)
    assert stage.only(c.KillChild).child == old
    stage.die(old, signal="SIGKILL")
    assert not stage.told(h.ChildFailedToStart)


def test_a_dead_child_is_replaced_by_the_successor_that_was_on_its_way() -> None:
    """Not by two."""
    stage = Stage(queue(max_child_age_s=10.0)).start()
    stage.wait(10.0)
    stage.die(ChildId(1))
    stage.wait(5.0)
    assert not stage.all(c.StartChild)
    assert stage.states() == ["starting"]


# --- reload -----------------------------------------------------------------------------------------------------------


def test_a_reload_replaces_child_by_child() -> None:
    """The first new child must be READY before an old one goes."""
    stage = Stage(queue(concurrency=2)).start()
    stage.tell(e.ReloadRequested())
    assert len(stage.told(h.ReloadStarted)) == 1
    assert len(stage.all(c.StartChild)) == 1
    assert not stage.all(c.SendExit)
    stage.ready()
    assert stage.core.snapshot(stage.now).reloading
    stage.die(stage.only(c.SendExit).child, exit_code=0)
    stage.ready()
    assert len(stage.all(c.SendExit)) == 1
    assert [happening.failed for happening in stage.told(h.ReloadEnded)] == [None]
    assert not stage.core.snapshot(stage.now).reloading


def test_a_failed_reload_keeps_the_old_children() -> None:
    """And says why."""
    stage = Stage(queue(concurrency=2)).start()
    stage.tell(e.ReloadRequested())
    fail_boot(stage, stage.only(c.StartChild).child)
    (ended,) = stage.told(h.ReloadEnded)
    assert ended.failed == "q: import: No module named 'x'"
    assert not stage.all(c.SendExit)
    assert stage.states() == ["idle", "idle"]
    assert not stage.wait(60.0).all(c.StartChild)


def test_a_reload_waits_for_no_message_that_takes_long() -> None:
    """While one old child is busy for an hour the others are replaced as they come free, by one process more."""
    stage = Stage(queue(concurrency=3)).start()
    long, second, third = stage.run_all(row(1), row(2), row(3))
    stage.tell(e.ReloadRequested())
    stage.ready()  # the successor of the first: it stands by
    stage.tell(e.MessageFinished(second.child, second.claim_id, SUCCESS))
    assert stage.only(c.SendExit).child == second.child
    stage.die(second.child, exit_code=0)
    stage.ready()
    stage.tell(e.MessageFinished(third.child, third.claim_id, SUCCESS))
    assert stage.only(c.SendExit).child == third.child
    stage.die(third.child, exit_code=0)
    stage.ready()
    assert [happening.failed for happening in stage.told(h.ReloadEnded)] == [None]
    assert len(stage.states()) == 4
    stage.finish(long)
    assert stage.only(c.SendExit).child == long.child


def test_a_reload_of_a_parked_queue_tries_at_once() -> None:
    """Perhaps the new code is what it waits for."""
    stage = parked()
    started = stage.tell(e.ReloadRequested()).all(c.StartChild)
    assert "q" in [command.queue for command in started]
    assert not stage.told(h.ReloadEnded)
    for command in started:
        stage.tell(e.ChildReady(command.child, 1))
    assert stage.look("q").parked is None


def test_a_reload_waits_for_no_backoff() -> None:
    """Failures of the broken code before delay the new code by nothing."""
    stage = Stage(queue(concurrency=2)).start()
    for _ in range(6):
        stage.tell(e.ReloadRequested())
        fail_boot(stage, stage.only(c.StartChild).child)
    assert stage.tell(e.ReloadRequested()).all(c.StartChild)


def test_a_second_reload_begins_again() -> None:
    """HUP during a reload: what became new meanwhile is old now."""
    stage = Stage().start()
    stage.tell(e.ReloadRequested())
    first = stage.only(c.StartChild).child
    stage.tell(e.ReloadRequested())
    assert not stage.all(c.StartChild)  # one at a time
    stage.tell(e.ChildReady(first, 1))
    stage.die(ChildId(1), exit_code=0)
    second = stage.only(c.StartChild).child
    stage.tell(e.ChildReady(second, 1))
    assert stage.only(c.SendExit).child == first
    assert [happening.failed for happening in stage.told(h.ReloadEnded)] == [None]


@pytest.mark.parametrize("event", [e.ShutdownRequested(), None])
def test_a_reload_without_a_running_supervisor_is_ignored(event: e.Event | None) -> None:
    """Before the start and during a stop."""
    stage = Stage()
    if event is not None:
        stage.start().run(row(1))
        stage.tell(event)
    assert not stage.tell(e.ReloadRequested()).last

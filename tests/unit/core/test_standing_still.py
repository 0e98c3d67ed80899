"""A supervisor that was frozen: nobody is blamed for what it could not hear, and leases are judged by the clock."""

from __future__ import annotations

import pytest

from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.settings import Timing
from supervisor.core.types import SUCCESS, DeathCause, DeathFacts
from tests.unit.core.stage import Stage, accounts, queue, row, transactional

BY_GUARD = DeathFacts(None, "SIGKILL", 12_345, 0.5, "", "", by_guard=True)
LONG = queue(visibility_timeout_s=600.0)


def freeze(stage: Stage, seconds: float, *events: e.Event) -> Stage:
    """Time passes unseen; then the driver says so, before it hands over what came meanwhile."""
    stage.now += seconds
    return stage.tell(e.StoodStill(seconds), *events)


def test_a_dispatch_that_was_answered_unheard_is_not_late() -> None:
    """STARTED lies in the socket: its child is not killed as unresponsive."""
    stage = Stage(LONG).start()
    dispatch = stage.give(row(1, lease_s=600.0)).only(c.Dispatch)
    freeze(stage, 20.0, e.TimePassed(), e.MessageStarted(dispatch.child, dispatch.claim_id))
    assert not stage.all(c.KillChild)
    assert not stage.wait(10.0).all(c.KillChild)


def test_a_child_that_stays_silent_is_killed_all_the_same() -> None:
    """It has as long to answer as it had left."""
    stage = Stage(LONG).start()
    dispatch = stage.give(row(1, lease_s=600.0)).only(c.Dispatch)
    stage.wait(4.0)
    assert not freeze(stage, 20.0).all(c.KillChild)
    assert stage.wait(1.5).only(c.KillChild).child == dispatch.child


def test_deadlines_of_ready_and_exit_move_too() -> None:
    """A child that boots, and one that was killed and is gone, are not given up."""
    stage = Stage(queue(hard_timeout_s=1.0, visibility_timeout_s=600.0), timing=Timing(ready_deadline_s=5.0))
    stage.tell(e.Started())
    assert not freeze(stage, 60.0, e.TimePassed()).all(c.KillChild)
    child = stage.children()[0]
    stage.tell(e.ChildSpawned(child, 7), e.ChildReady(child, 20_000))
    stage.run(row(1, lease_s=600.0))
    stage.wait(1.0).only(c.KillChild)
    assert not freeze(stage, 60.0, e.TimePassed()).told(h.ChildUnkillable)


def test_a_transactional_child_is_not_late_with_its_answers() -> None:
    """Permit, claim and commit: what it said meanwhile is read before it is judged."""
    stage = Stage(transactional()).start()
    grant = stage.only(c.GrantPermit)
    assert not freeze(stage, 100.0, e.TimePassed()).all(c.KillChild)
    stage.tx_claim(grant, 1)
    stage.ask_commit(grant, SUCCESS)
    assert not freeze(stage, 100.0, e.TimePassed()).all(c.KillChild)
    assert stage.tell(e.Committed(grant.child, grant.claim_id)).told(h.MessageSucceeded)


def test_a_lease_that_ran_out_meanwhile_is_lost() -> None:
    """The clock of leases goes on: its child is killed, nothing of it is acknowledged."""
    stage = Stage(queue()).start()
    dispatch = stage.run(row(1))
    freeze(stage, 60.0)
    assert stage.only(c.KillChild).child == dispatch.child


@pytest.mark.parametrize("deaths", [0, 2])
def test_a_kill_by_the_guard_is_a_lost_lease_and_charges_nothing(deaths: int) -> None:
    """Whatever is heard first, the death or the clock; also for a message that is one death from its end."""
    stage = Stage(queue()).start()
    dispatch = stage.run(row(1, read_ct=3, accounts=accounts(1, deaths=deaths)))
    stage.tell(e.ChildDied(dispatch.child, BY_GUARD))
    (ended,) = stage.told(h.ChildEnded)
    assert (ended.cause, ended.charged) == (DeathCause.LEASE_LOST, False)
    (item,) = stage.settlements()
    assert type(item.settlement).__name__ == "Release"
    assert stage.told(h.LeaseLost)


def test_idle_children_that_the_guard_killed_park_no_queue() -> None:
    """Their results came in time and were read too late: that says nothing about the handler."""
    stage = Stage(queue(concurrency=10)).start()
    for child in stage.children():
        stage.tell(e.ChildDied(child, BY_GUARD))
        assert not stage.told(h.ChildFailedToStart)
    assert stage.look().parked is None
    assert stage.states() == ["starting"] * 10

"""The core: routes events to the machine of their queue, and owns what concerns all queues: drain, reload, the end.

state       meaning
starting    before `Started`
running     normal
draining    no new work; what runs may finish within the grace period
killing     the grace period is over or a second signal came: acks are off, children are killed
stopped     `Exit` was commanded
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import Any

from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.queue import QueueMachine
from supervisor.core.regular import RegularQueue
from supervisor.core.settings import CoreSettings
from supervisor.core.snapshot import Snapshot
from supervisor.core.states import ChildState
from supervisor.core.transactional import TransactionalQueue
from supervisor.core.types import ChildId, DeathCause, Mode, QueueName


class CoreState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    KILLING = "killing"
    STOPPED = "stopped"


class Core:
    """`uniform()` gives numbers in [0, 1). Times are seconds on one clock that never goes back."""

    def __init__(self, settings: CoreSettings, uniform: Callable[[], float]) -> None:
        self._settings = settings
        self._ctx = Context(settings, uniform)
        self._state = CoreState.STARTING
        self._queues: dict[QueueName, QueueMachine] = {}
        for queue in settings.queues:
            machine = TransactionalQueue if queue.mode is Mode.TRANSACTIONAL else RegularQueue
            self._queues[QueueName(queue.name)] = machine(self._ctx, queue)
        self._machines = tuple(self._queues.values())
        self._started_at = 0.0
        self._drain_began = 0.0
        self._grace_ends = inf
        self._kill_at = inf
        self._end_at = inf
        self._timed_out = False
        self._failed = False  # every queue is parked
        self._reloading: set[QueueName] = set()
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            e.TimePassed: lambda _event, _now: None,
            e.StoodStill: self._stood_still,
            e.Claimed: self._claimed,
            e.ClaimFailed: self._claim_failed,
            e.BodyFetched: self._body_fetched,
            e.BodyFetchFailed: self._body_fetch_failed,
            e.Renewed: self._renewed,
            e.RenewFailed: self._renew_failed,
            e.Settled: self._settled,
            e.Reckoned: self._reckoned,
            e.Notified: self._notified,
            e.ListenerUp: self._listener_up,
            e.ListenerDown: self._listener_down,
            e.ChildSpawned: self._child_spawned,
            e.SpawnFailed: self._spawn_failed,
            e.ChildReady: self._child_ready,
            e.ChildBootFailed: self._child_boot_failed,
            e.MessageStarted: self._message_started,
            e.MessageFinished: self._message_finished,
            e.ProgressReported: self._progress_reported,
            e.ChildDied: self._child_died,
            e.ProtocolBroken: self._protocol_broken,
            e.MemoryMeasured: self._memory_measured,
            e.PermitEmpty: self._permit_empty,
            e.TransactionClaimed: self._transaction_claimed,
            e.CommitRequested: self._commit_requested,
            e.Committed: self._committed,
            e.TransactionEnded: self._transaction_ended,
            e.Started: self._started,
            e.ShutdownRequested: self._shutdown_requested,
            e.EscalationRequested: self._escalation_requested,
            e.ReloadRequested: self._reload_requested,
            e.PauseChanged: self._pause_changed,
            e.CancelRequested: self._cancel_requested,
        }

    # --- the three calls of the shell -------------------------------------------------------------------------------

    def handle(self, event: e.Event, now: float) -> c.Answer:
        """What must be done and told now that `event` happened. The event first, then what is due by the clock."""
        if self._state is CoreState.STOPPED:
            return []
        self._handlers[type(event)](event, now)
        ticked = False
        for machine in self._machines:
            if now >= machine.next_at:
                machine.tick(now)
                ticked = True
        if self._state is CoreState.RUNNING:
            if self._reloading:
                self._check_reload()
            if ticked and all(machine.pool.restarts.parked is not None for machine in self._queues.values()):
                self._failed = True  # nothing can run: better to end, with an exit code that says so
                self._begin_drain(now)
        if self._state is not CoreState.RUNNING:
            self._advance_shutdown(now)
        return self._ctx.take()

    def next_deadline(self) -> float:
        """When to call `handle(TimePassed())` if nothing else happens."""
        if self._state is CoreState.STOPPED:
            return inf
        deadline = min(self._grace_ends, self._kill_at, self._end_at)
        for machine in self._machines:
            deadline = min(deadline, machine.next_at)
        return deadline

    def snapshot(self, now: float) -> Snapshot:
        queues = tuple(machine.snapshot(now) for machine in self._queues.values())
        return Snapshot(
            state=str(self._state),
            now=now,
            started_at=self._started_at,
            reloading=bool(self._reloading),
            queues=queues,
        )

    def holds(self, queue: str, msg_id: int) -> bool:
        """Whether a message is in our hands, for the answer to a cancel."""
        machine = self._queues.get(QueueName(queue))
        return machine is not None and any(delivery.msg_id == msg_id for delivery in machine.held())

    # --- database ---------------------------------------------------------------------------------------------------

    def _regular(self, queue: QueueName) -> RegularQueue:
        machine = self._queues[queue]
        if not isinstance(machine, RegularQueue):
            raise TypeError(f"{queue} is not in regular mode")
        return machine

    def _claimed(self, event: e.Claimed, now: float) -> None:
        self._regular(event.queue).claimed(event, now)

    def _claim_failed(self, event: e.ClaimFailed, now: float) -> None:
        self._regular(event.queue).claim_failed(event.error, now)

    def _body_fetched(self, event: e.BodyFetched, now: float) -> None:
        self._regular(event.queue).body_fetched(event.claim_id, event.found, event.body, now)

    def _body_fetch_failed(self, event: e.BodyFetchFailed, now: float) -> None:
        self._regular(event.queue).body_fetch_failed(event.claim_id, event.error, now, permanent=event.permanent)

    def _renewed(self, event: e.Renewed, now: float) -> None:
        self._regular(event.queue).renewed(event.results, event.asked_at, now)

    def _renew_failed(self, event: e.RenewFailed, now: float) -> None:
        self._regular(event.queue).renew_failed(event.error, now)

    def _settled(self, event: e.Settled, now: float) -> None:
        self._regular(event.queue).settled(event.results, now)

    def _reckoned(self, event: e.Reckoned, now: float) -> None:
        machine = self._queues[event.queue]
        if isinstance(machine, TransactionalQueue):
            machine.reckoned(event.claim_id, event.outcome, now, committed=event.committed, error=event.error)

    def _notified(self, event: e.Notified, now: float) -> None:
        machine = self._queues.get(event.queue)
        if machine is not None:
            machine.notified(now)

    def _listener_up(self, event: e.ListenerUp, now: float) -> None:
        for name in event.queues:
            machine = self._queues.get(name)
            if machine is not None:
                machine.listener_up = True
                machine.claim_not_before = 0.0  # the database is back: no backoff any more
                machine.notified(now)

    def _listener_down(self, _event: e.ListenerDown, _now: float) -> None:
        for machine in self._queues.values():
            machine.listener_up = False

    # --- children ---------------------------------------------------------------------------------------------------

    def _child(self, child_id: ChildId) -> tuple[QueueMachine, Child] | None:
        """None for a child that is already forgotten: a late event about it says nothing."""
        owner = self._ctx.owners.get(child_id)
        if owner is None:
            return None
        machine = self._queues[owner]
        child = machine.pool.children.get(child_id)
        return None if child is None else (machine, child)

    def _child_spawned(self, event: e.ChildSpawned, now: float) -> None:
        if found := self._child(event.child):
            found[0].spawned(found[1], event.pid)
            found[0].next_at = now

    def _spawn_failed(self, event: e.SpawnFailed, now: float) -> None:
        if found := self._child(event.child):
            found[0].pool.spawn_failed(found[1], now, event.error)
            found[0].next_at = now
            self._ctx.owners.pop(event.child, None)

    def _child_ready(self, event: e.ChildReady, now: float) -> None:
        if found := self._child(event.child):
            found[0].ready(found[1], event.rss_kb, now)
            found[0].next_at = now

    def _child_boot_failed(self, event: e.ChildBootFailed, _now: float) -> None:
        if found := self._child(event.child):
            found[1].boot_error = f"{event.kind}: {event.error}"

    def _message_started(self, event: e.MessageStarted, now: float) -> None:
        if found := self._child(event.child):
            machine, child = found
            if isinstance(machine, RegularQueue | TransactionalQueue):
                machine.started(child, event.claim_id, now)

    def _message_finished(self, event: e.MessageFinished, now: float) -> None:
        if found := self._child(event.child):
            machine, child = found
            if isinstance(machine, RegularQueue):
                machine.finished(child, event.claim_id, event.outcome, now)

    def _progress_reported(self, event: e.ProgressReported, _now: float) -> None:
        if found := self._child(event.child):
            found[0].progress(found[1], event.claim_id, event.text)

    def _child_died(self, event: e.ChildDied, now: float) -> None:
        if found := self._child(event.child):
            found[0].died(found[1], event.facts, now)
            found[0].next_at = now
        self._ctx.owners.pop(event.child, None)

    def _protocol_broken(self, event: e.ProtocolBroken, now: float) -> None:
        if found := self._child(event.child):
            found[0].protocol_broken(found[1], event.error, now)
            found[0].next_at = now

    def _memory_measured(self, event: e.MemoryMeasured, now: float) -> None:
        if found := self._child(event.child):
            found[0].memory_measured(found[1], event.tree_bytes, now)
            found[0].next_at = now

    # --- transactional ----------------------------------------------------------------------------------------------

    def _transactional(self, child_id: ChildId) -> tuple[TransactionalQueue, Child] | None:
        found = self._child(child_id)
        if found is None or not isinstance(found[0], TransactionalQueue):
            return None
        return found[0], found[1]

    def _permit_empty(self, event: e.PermitEmpty, now: float) -> None:
        if found := self._transactional(event.child):
            found[0].permit_empty(found[1], event, now)

    def _transaction_claimed(self, event: e.TransactionClaimed, now: float) -> None:
        if found := self._transactional(event.child):
            found[0].claimed(found[1], event, now)

    def _commit_requested(self, event: e.CommitRequested, now: float) -> None:
        if found := self._transactional(event.child):
            found[0].commit_requested(found[1], event.claim_id, event.outcome, now)

    def _committed(self, event: e.Committed, now: float) -> None:
        if found := self._transactional(event.child):
            found[0].committed(found[1], event.claim_id, now)

    def _transaction_ended(self, event: e.TransactionEnded, now: float) -> None:
        if found := self._transactional(event.child):
            found[0].transaction_ended(found[1], event, now)

    # --- control ----------------------------------------------------------------------------------------------------

    def _stood_still(self, event: e.StoodStill, _now: float) -> None:
        for machine in self._machines:
            machine.stood_still(event.seconds)

    def _started(self, _event: e.Started, now: float) -> None:
        if self._state is not CoreState.STARTING:
            return
        self._state = CoreState.RUNNING
        self._started_at = now
        for machine in self._queues.values():
            machine.pool.start(now)
            machine.next_at = now

    def _pause_changed(self, event: e.PauseChanged, now: float) -> None:
        machine = self._queues.get(event.queue)
        if machine is not None:
            machine.pause(event.paused, now)
            machine.next_at = now

    def _cancel_requested(self, event: e.CancelRequested, now: float) -> None:
        machine = self._queues.get(event.queue)
        if machine is not None:
            machine.cancel(event.msg_id, now)
            machine.next_at = now

    def _reload_requested(self, _event: e.ReloadRequested, now: float) -> None:
        if self._state is not CoreState.RUNNING:
            return
        self._ctx.tell(h.ReloadStarted())
        self._reloading = set(self._queues)
        for machine in self._queues.values():
            machine.pool.reload(now)
            machine.next_at = now

    def _check_reload(self) -> None:
        for name in list(self._reloading):
            if not self._queues[name].pool.reloading:
                self._reloading.discard(name)
        if not self._reloading:
            pools = [machine.pool for machine in self._queues.values()]
            failed = "; ".join(f"{pool.name}: {pool.reload_failed}" for pool in pools if pool.reload_failed)
            self._ctx.tell(h.ReloadEnded(failed or None))

    # --- shutdown ---------------------------------------------------------------------------------------------------

    def _shutdown_requested(self, _event: e.ShutdownRequested, now: float) -> None:
        if self._state in (CoreState.STARTING, CoreState.RUNNING):
            self._begin_drain(now)

    def _begin_drain(self, now: float) -> None:
        self._state = CoreState.DRAINING
        self._drain_began = now
        self._grace_ends = now + self._settings.grace_s
        snapshot = self.snapshot(now)
        self._ctx.tell(
            h.ShutdownStarted(
                in_flight=sum(queue.in_flight for queue in snapshot.queues),
                waiting=sum(queue.waiting for queue in snapshot.queues),
            )
        )
        self._ctx.draining = True
        for machine in self._queues.values():
            machine.drain(now)
            machine.next_at = now

    def _escalation_requested(self, _event: e.EscalationRequested, now: float) -> None:
        if self._state in (CoreState.STARTING, CoreState.RUNNING):
            self._begin_drain(now)
        if self._state is CoreState.DRAINING:
            self._escalate(now, "signal", term_first=False)
        elif self._state is CoreState.KILLING:
            self._kill_now(now, "signal")

    def _escalate(self, now: float, why: str, *, term_first: bool) -> None:
        """The grace period is over: nothing is acknowledged any more."""
        self._state = CoreState.KILLING
        self._timed_out = True
        self._ctx.acks_off = True
        self._grace_ends = inf
        self._end_at = now + self._settings.kill_after_s
        if not term_first:
            self._kill_now(now, why)
            return
        # One step of the ladder before KILL, inside kill_after; what the database must hear still fits behind it.
        self._kill_at = now + min(1.0, self._settings.kill_after_s * 0.3)
        for machine in self._queues.values():
            for child in machine.pool.children.values():
                if child.state is ChildState.BUSY:
                    self._ctx.do(c.SendTerm(child.id))

    def _kill_now(self, now: float, why: str) -> None:
        self._kill_at = inf
        killed = 0
        for machine in self._queues.values():
            killed += machine.kill_all(now)
            machine.next_at = now
        if killed:
            self._ctx.tell(h.ShutdownEscalated(why, killed))

    def _advance_shutdown(self, now: float) -> None:
        if self._state is CoreState.DRAINING and now >= self._grace_ends:
            self._escalate(now, "grace", term_first=True)
        if self._state is CoreState.KILLING and now >= self._kill_at:
            self._kill_now(now, "grace")
        if self._state in (CoreState.DRAINING, CoreState.KILLING):
            clean = all(machine.pool.empty and machine.open_work == 0 for machine in self._queues.values())
            if not clean and now >= self._end_at:
                self._kill_now(now, "grace")  # who was spared until now: time may have passed in one leap
            if clean or now >= self._end_at:
                self._finish(now)

    def _finish(self, now: float) -> None:
        killed = 0
        for machine in self._queues.values():
            killed += machine.pool.killed_in_shutdown
            killed += sum(1 for child in machine.pool.children.values() if child.kill_cause is DeathCause.SHUTDOWN)
            if isinstance(machine, RegularQueue):
                machine.settling.give_up_all("the supervisor stops")
            elif isinstance(machine, TransactionalQueue):
                machine.reckonings.give_up()
        self._state = CoreState.STOPPED
        self._ctx.tell(h.ShutdownEnded(self._timed_out, killed, now - self._drain_began))
        self._ctx.do(c.Exit(1 if self._failed else 3 if killed else 0))

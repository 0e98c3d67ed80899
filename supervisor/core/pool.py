"""The children of one queue: slots, spares, restarts, recycling and reload.

A pool keeps `concurrency + standby` processes, one a slot; at most `concurrency` of them have a message in hand, so a
spare is nothing but a ready child that has none. Who replaces whom: recycling and reload start the successor first
and let the old child go when the new one is READY; a death frees the slot at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from supervisor.core import commands as c
from supervisor.core import happenings as h
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.restarts import Restarts
from supervisor.core.settings import QueueSettings
from supervisor.core.states import ChildState, DeliveryState
from supervisor.core.types import ChildId, DeathCause, DeathFacts, QueueName


class Pool:
    """`sooner(deadline)` is told of every new deadline of a child; `tick` must be called by then."""

    def __init__(self, ctx: Context, settings: QueueSettings, sooner: Callable[[float], None]) -> None:
        self._ctx = ctx
        self._settings = settings
        self._timing = ctx.settings.timing
        self._sooner = sooner
        self.name = QueueName(settings.name)
        self._concurrency = settings.concurrency
        self._wears = settings.max_tasks_per_child is not None or settings.memory_limit_bytes is not None
        self.size = settings.concurrency + settings.standby
        self.children: dict[ChildId, Child] = {}
        self.idle: deque[Child] = deque()
        self.busy = 0  # children with a message in hand: reserved ones, and killed ones until they are gone
        self.restarts = Restarts(self._timing, ctx.uniform)
        self.generation = 0
        self.reloading = False
        self.reload_failed: str | None = None
        self.killed_in_shutdown = 0
        self.given_up: list[Child] = []  # unkillable since the queue last looked
        self._incarnations = [0] * self.size
        self._boot_s = 0.0  # what starting a child took of late
        self._started = False

    # --- what others ask ------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Children that have a message or could take one, at most `concurrency`."""
        return min(self._settings.concurrency, sum(map(_works, self.children.values())))

    @property
    def free(self) -> int:
        """How many messages could be dispatched now."""
        idle, allowed = len(self.idle), self._concurrency - self.busy
        return max(0, min(allowed, idle))

    @property
    def empty(self) -> bool:
        """No process is left that we still wait for."""
        return not any(child.alive for child in self.children.values())

    # --- slots ----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        self._started = True
        self.fill(now)

    def fill(self, now: float) -> None:
        """Start what is missing, when restarts are allowed."""
        if not self._started or self._ctx.draining or now < self.restarts.not_before:
            return
        probing = self.restarts.parked is not None or self.restarts.consecutive > 0
        if probing and any(child.state is ChildState.STARTING for child in self.children.values()):
            return  # one probe at a time until a child is READY again
        held = {child.slot for child in self.children.values() if child.alive and child.successor_of is None}
        room = self.size + 1 - sum(child.alive for child in self.children.values())
        missing = [slot for slot in range(self.size) if slot not in held]
        for slot in missing[: max(0, min(room, 1 if probing else room))]:
            self._spawn(now, slot, None)

    def _spawn(self, now: float, slot: int, successor_of: ChildId | None) -> Child:
        incarnation = self._incarnations[slot]
        self._incarnations[slot] += 1
        child = Child(self._ctx.next_child(), slot, incarnation, self.generation, now, successor_of)
        child.max_messages = self._limit_of_messages(slot, incarnation)
        child.deadline = now + self._timing.ready_deadline_s
        self._sooner(child.deadline)
        self.children[child.id] = child
        self._ctx.owners[child.id] = self.name
        self._ctx.tell(h.ChildStarting(self.name, child.id, slot, incarnation))
        self._ctx.do(c.StartChild(child.id, self.name, slot, incarnation))
        return child

    def _limit_of_messages(self, slot: int, incarnation: int) -> int | None:
        """Children that started together must not wear out together: the first ones get fewer, slot by slot."""
        limit = self._settings.max_tasks_per_child
        if limit is None or limit < 10 or incarnation > 0:
            return limit
        return limit - limit * slot // (2 * self.size)

    # --- a child's life -------------------------------------------------------------------------------------------

    def became_ready(self, child: Child, now: float, rss_kb: int) -> None:
        if child.state is not ChildState.STARTING:
            return  # killed while it said so
        child.move(ChildState.IDLE)
        child.ready_at = now
        child.deadline = inf
        child.tree_bytes = rss_kb * 1024
        self._boot_s = max(now - child.spawned_at, (self._boot_s + now - child.spawned_at) / 2)
        age = self._settings.max_child_age_s
        if age is not None:
            # Jitter: children that started together must not retire together.
            child.retire_at = now + age * (0.8 + 0.2 * self._ctx.uniform())
            self._sooner(child.retire_at)
        self._ctx.tell(h.ChildBecameReady(self.name, child.id, child.slot, child.pid, now - child.spawned_at))
        if self.restarts.succeeded():
            self._ctx.tell(h.QueueUnparked(self.name))
        if child.successor_of is not None:
            old = self.children.get(child.successor_of)
            child.successor_of = None
            if old is not None and old.alive:
                old.followed = True
                self.retire(old, now)
        if self._ctx.draining or child.retiring:
            self.retire(child, now)
        else:
            self.idle.append(child)
        self.fill(now)
        self._start_successor(now)
        self._check_reloaded()

    def reserve(self) -> Child:
        """Take an idle child; it is RESERVED until `occupy` or `vacate`. Call only when `free` > 0."""
        child = self.idle.popleft()
        child.move(ChildState.RESERVED)
        self.busy += 1
        return child

    def occupy(self, child: Child) -> None:
        child.move(ChildState.BUSY)

    def take(self) -> Child:
        """Take an idle child and make it BUSY in one step. Call only when `free` > 0."""
        child = self.idle.popleft()
        child.move(ChildState.BUSY)
        self.busy += 1
        return child

    def vacate(self, child: Child, now: float, *, finished: bool) -> None:
        """Its hands are empty again."""
        child.delivery = None
        self.busy -= 1
        if finished:
            child.messages += 1
        if child.state not in (ChildState.BUSY, ChildState.RESERVED):
            return  # a kill is under way
        child.move(ChildState.IDLE)
        if not (child.retiring or self._ctx.draining or self._wears or self._outdated(child, now)):
            self.idle.append(child)  # nearly always
        elif child.retiring or self._ctx.draining:
            self._send_exit(child, now)
        elif self._used_up(child) or self._over_memory(child):
            child.retiring = True
            self._start_successor(now)
        elif self._outdated(child, now) and self._dispensable(child):
            self._send_exit(child, now)
        else:
            self.idle.append(child)

    def retire(self, child: Child, now: float) -> None:
        """It takes no further message, and ends when its hands are empty."""
        child.retiring = True
        if child.state is ChildState.IDLE:
            if child in self.idle:
                self.idle.remove(child)
            self._send_exit(child, now)
        elif child.state is ChildState.STARTING:
            self.kill(child, now, DeathCause.RETIRED, with_stack=False)

    def _send_exit(self, child: Child, now: float) -> None:
        child.retired = True
        child.move(ChildState.EXITING)
        child.deadline = now + self._timing.exit_deadline_s
        self._sooner(child.deadline)
        self._ctx.do(c.SendExit(child.id))

    def kill(self, child: Child, now: float, cause: DeathCause, *, with_stack: bool) -> None:
        """Decide a kill; what is said of its end from now on is `cause`, whatever the wait status says."""
        if child.state in (ChildState.KILLED, ChildState.UNKILLABLE, ChildState.GONE):
            return
        if child.state is ChildState.IDLE and child in self.idle:
            self.idle.remove(child)
        child.kill_cause = cause
        child.retired = child.retired or cause is DeathCause.RETIRED
        child.move(ChildState.KILLED)
        child.deadline = now + self._timing.unkillable_s
        self._sooner(child.deadline)
        msg_id = child.delivery.msg_id if child.delivery is not None else None
        self._ctx.tell(h.ChildStopping(self.name, child.id, child.pid, cause, msg_id))
        self._ctx.do(c.KillChild(child.id, with_stack))

    def ended(self, child: Child, now: float, facts: DeathFacts) -> DeathCause:
        """The process is reaped. Returns the cause; the caller settles the message that was in its hands."""
        cause = _cause(child, facts)
        before = child.state
        if before is ChildState.IDLE and child in self.idle:
            self.idle.remove(child)
        if child.delivery is not None:
            self.busy -= 1
        child.move(ChildState.GONE)
        del self.children[child.id]
        if cause is DeathCause.SHUTDOWN:
            self.killed_in_shutdown += 1
        for other in self.children.values():
            if other.successor_of == child.id:
                other.successor_of = None  # it holds the slot now
        self._count(child, now, cause, facts)
        self.fill(now)
        self._start_successor(now)
        self._check_reloaded()
        return cause

    def _count(self, child: Child, now: float, cause: DeathCause, facts: DeathFacts) -> None:
        """Boot failures and idle deaths count against the queue; what we asked for, or a message did, does not."""
        if child.retired or self._ctx.draining or (child.delivery is not None and child.delivery.state not in _UNSENT):
            return
        if child.ready_at is None:
            why = child.boot_error or f"ended before it was READY: {_describe(cause, facts)}"
            self._boot_failed(child, now, why, definite=True, from_outside=_is_from_outside(cause, facts))
        elif cause in _OWN_DEATHS:
            why = f"an idle child ended: {_describe(cause, facts)}"
            self._failed(child, now, why, definite=False, from_outside=_is_from_outside(cause, facts))

    def spawn_failed(self, child: Child, now: float, error: str) -> None:
        child.move(ChildState.GONE)
        del self.children[child.id]
        if not self._ctx.draining:
            why = f"cannot start a process: {error}"
            self._boot_failed(child, now, why, definite=False, from_outside=False)

    def _boot_failed(self, child: Child, now: float, why: str, *, definite: bool, from_outside: bool) -> None:
        if self.reloading and child.generation == self.generation:
            self._give_up_reload(why)
        self._failed(child, now, why, definite=definite, from_outside=from_outside)

    def _failed(self, child: Child, now: float, why: str, *, definite: bool, from_outside: bool) -> None:
        parked = self.restarts.parked
        others = any(map(_works, self.children.values()))
        delay = self.restarts.failed(
            now,
            why,
            spawned_at=child.spawned_at,
            definite=definite,
            from_outside=from_outside,
            others_ready=others,
        )
        self._ctx.tell(h.ChildFailedToStart(self.name, child.id, child.slot, why, delay))
        if self.restarts.parked is not None and parked is None:
            self._ctx.tell(h.QueueParked(self.name, why, delay))

    # --- replacing ------------------------------------------------------------------------------------------------

    def about_to_wear_out(self, child: Child, now: float, pace_s: float | None = None) -> None:
        """Called when it got a message: the successor boots while the last ones are handled, not after them.

        `pace_s`: how long a message takes; None: as long as this child's took so far.
        """
        if child.max_messages is None or child.retiring:
            return
        left = child.max_messages - child.messages - 1
        if left <= 0:
            child.retiring = True
        elif not child.wearing:
            if pace_s is None:
                pace_s = (now - (child.ready_at or now)) / (child.messages + 1)
            before = sum(1 for other in self.children.values() if other.wearing or other.retiring)
            child.wearing = left <= child.max_messages // 2 and left * pace_s < self._boot_s * (1 + before)
        if child.wearing or child.retiring:
            self._start_successor(now)

    def _start_successor(self, now: float) -> None:
        """Never all at once: one process more than the pool's size, so the next waits until an old one is gone."""
        if self._ctx.draining or now < self.restarts.not_before:
            return
        due = [child for child in self.children.values() if self._due(child, now)]
        if not due or any(child.successor_of is not None for child in self.children.values()):
            return
        if sum(child.alive for child in self.children.values()) <= self.size:
            # An idle one goes as soon as its successor is there; a busy one would stay beside it for a long time.
            old = min(due, key=lambda child: (child.state is not ChildState.IDLE, not child.retiring))
            self._spawn(now, old.slot, old.id)

    def _due(self, child: Child, now: float) -> bool:
        if child.state not in _ABLE or child.followed:
            return False
        return child.retiring or child.wearing or self._outdated(child, now)

    def _outdated(self, child: Child, now: float) -> bool:
        return now >= child.retire_at or child.generation < self.generation

    def _dispensable(self, child: Child) -> bool:
        """Enough others work already: the successor of a child whose last message takes long stands in for this one."""
        others = [other for other in self.children.values() if other is not child and _works(other)]
        proven = any(other.generation == self.generation for other in others)
        return proven and len(others) >= self._settings.concurrency

    def _used_up(self, child: Child) -> bool:
        return child.max_messages is not None and child.messages >= child.max_messages

    def _over_memory(self, child: Child) -> bool:
        limit = self._settings.memory_limit_bytes
        return limit is not None and child.tree_bytes is not None and child.tree_bytes > limit

    def reload(self, now: float) -> None:
        """New code, child by child. The first new child must be READY before an old one goes."""
        self.generation += 1
        self.reloading = True
        self.reload_failed = None
        self.restarts.not_before = now  # perhaps the new code is what it waits for
        self.fill(now)
        self._start_successor(now)
        self._check_reloaded()

    def _give_up_reload(self, why: str) -> None:
        self.reloading = False
        self.reload_failed = why
        for child in self.children.values():
            child.generation = self.generation

    def _check_reloaded(self) -> None:
        """Every slot has a READY child of the new code; an old one may still have its last message in hand."""
        if not self.reloading:
            return
        children = [child for child in self.children.values() if child.alive and not child.followed]
        if children and all(child.generation == self.generation and child.ready_at is not None for child in children):
            self.reloading = False

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Deadlines of children that have no message in hand, restarts, ages. Returns the next deadline."""
        for child in list(self.children.values()):
            if now < child.deadline:
                continue
            if child.state is ChildState.STARTING:
                child.boot_error = child.boot_error or (
                    f"not READY within {self._timing.ready_deadline_s:g} s: the import of the handler hangs?"
                )
                self.kill(child, now, DeathCause.UNRESPONSIVE, with_stack=True)
            elif child.state is ChildState.EXITING:
                self.kill(child, now, DeathCause.RETIRED, with_stack=False)
            elif child.state is ChildState.KILLED:
                self._give_up(child)
        self.fill(now)
        self._start_successor(now)
        self._check_reloaded()
        return self._next_deadline(now)

    def _give_up(self, child: Child) -> None:
        child.move(ChildState.UNKILLABLE)
        child.deadline = inf
        if child.delivery is not None:
            self.busy -= 1
        self.given_up.append(child)
        self._ctx.tell(h.ChildUnkillable(self.name, child.id, child.pid))
        self._ctx.do(c.AbandonChild(child.id))

    def _next_deadline(self, now: float) -> float:
        deadline = inf
        for child in self.children.values():
            if child.state in (ChildState.STARTING, ChildState.EXITING, ChildState.KILLED):
                deadline = min(deadline, child.deadline)
            elif now < child.retire_at:
                deadline = min(deadline, child.retire_at)
        if self._started and not self._ctx.draining and self.restarts.not_before > now:
            deadline = min(deadline, self.restarts.not_before)
        return deadline


_ABLE = frozenset({ChildState.IDLE, ChildState.RESERVED, ChildState.BUSY})
_OWN_DEATHS = frozenset({DeathCause.SIGNAL, DeathCause.EXIT, DeathCause.OOM, DeathCause.PROTOCOL})
_SIGNALS_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_UNSENT = frozenset({DeliveryState.LOADING, DeliveryState.PERMITTED})  # no message was in its hands yet


def _works(child: Child) -> bool:
    """It has a message or can take one; not one that only waits for its successor."""
    return child.state in _ABLE and not (child.retiring and child.state is ChildState.IDLE)


def _cause(child: Child, facts: DeathFacts) -> DeathCause:
    if child.kill_cause is not None:
        return child.kill_cause
    if child.retired:
        return DeathCause.RETIRED
    if facts.by_guard:
        return DeathCause.LEASE_LOST
    if facts.oom:
        return DeathCause.OOM
    return DeathCause.SIGNAL if facts.signal is not None else DeathCause.EXIT


def _is_from_outside(cause: DeathCause, facts: DeathFacts) -> bool:
    """Somebody ended it with a signal that no program gives itself for a fault of its own."""
    return cause is DeathCause.SIGNAL and facts.signal in _SIGNALS_FROM_OUTSIDE


def _describe(cause: DeathCause, facts: DeathFacts) -> str:
    how = facts.signal or f"exit code {facts.exit_code}"
    return f"{cause} ({how})"

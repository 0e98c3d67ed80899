"""What the machines of both modes share: children, pause, stop requests, kills, the snapshot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf

from supervisor.core import happenings as h
from supervisor.core.child import Child
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.limits import Limits
from supervisor.core.policy import Judge
from supervisor.core.pool import Pool
from supervisor.core.settings import QueueSettings
from supervisor.core.snapshot import ChildSnapshot, QueueSnapshot
from supervisor.core.states import ChildState, DeliveryState
from supervisor.core.types import ClaimId, DeathCause, DeathFacts, QueueName, StopReason
from supervisor.core.wakeups import Wakeups


class QueueMachine(ABC):
    def __init__(self, ctx: Context, settings: QueueSettings) -> None:
        self.ctx = ctx
        self.settings = settings
        self.timing = ctx.settings.timing
        self.name = QueueName(settings.name)
        self.next_at = 0.0  # when `tick` must be called at the latest
        self.pool = Pool(ctx, settings, self.sooner)
        self.limits = Limits(ctx, settings, self.pool)
        self.judge = Judge(ctx.settings, settings, ctx.uniform)
        self.wakeups = Wakeups(settings.polling_interval_s, self.timing, ctx.uniform)
        self.paused = False
        self.claims_attempted_at: float | None = None
        self.database_error: str | None = None
        self.unheard: str | None = None  # why the last renewal or settlement did not reach the database
        self.listener_up = False
        self._claim_failures = 0
        self.claim_not_before = 0.0

    # --- to be filled in by a mode ----------------------------------------------------------------------------------

    @abstractmethod
    def advance(self, now: float) -> None:
        """Give work to free children, and fetch more where there is room."""

    @abstractmethod
    def give_back_waiting(self, now: float, reason: str) -> None:
        """Release what was given to no child."""

    @abstractmethod
    def died(self, child: Child, facts: DeathFacts, now: float) -> None: ...

    @abstractmethod
    def tick_mode(self, now: float) -> None: ...

    @abstractmethod
    def unkillable(self, child: Child, now: float) -> None: ...

    @property
    @abstractmethod
    def reading(self) -> bool:
        """The database is being asked for messages right now."""

    @property
    @abstractmethod
    def open_work(self) -> int:
        """Deliveries that are not ended."""

    @abstractmethod
    def held(self) -> list[Delivery]:
        """All open deliveries, for the snapshot and cancel."""

    # --- children ---------------------------------------------------------------------------------------------------

    def spawned(self, child: Child, pid: int) -> None:
        child.pid = pid

    def ready(self, child: Child, rss_kb: int, now: float) -> None:
        self.pool.became_ready(child, now, rss_kb)
        self.advance(now)

    def protocol_broken(self, child: Child, error: str, now: float) -> None:
        """Beyond repair: only this child suffers."""
        child.boot_error = child.boot_error or f"protocol: {error}"
        self.pool.kill(child, now, DeathCause.PROTOCOL, with_stack=False)

    def memory_measured(self, child: Child, tree_bytes: int, now: float) -> None:
        child.tree_bytes = tree_bytes
        limit, delivery = self.settings.memory_limit_bytes, child.delivery
        running = child.state is ChildState.BUSY and delivery is not None and delivery.state is DeliveryState.RUNNING
        if running and limit is not None and tree_bytes > limit:
            self.pool.kill(child, now, DeathCause.MEMORY_LIMIT, with_stack=True)

    def progress(self, child: Child, claim_id: ClaimId, text: str) -> None:
        delivery = child.delivery
        if delivery is not None and delivery.id == claim_id:
            delivery.progress = text
            self.ctx.tell(h.HandlerProgress(self.name, delivery.msg_id, text))

    def tell_ended(
        self, child: Child, cause: DeathCause, facts: DeathFacts, delivery: Delivery | None, verdict: Verdict | None
    ) -> None:
        self.ctx.tell(
            h.ChildEnded(
                self.name,
                child.id,
                child.slot,
                child.pid,
                cause,
                facts,
                None if delivery is None else delivery.msg_id,
                None if delivery is None else delivery.attempt,
                verdict is not None and verdict.charged,
            )
        )

    # --- reading ----------------------------------------------------------------------------------------------------

    def notified(self, now: float) -> None:
        if not self.wakeups.hungry:
            self.ctx.tell(h.WokenUp(self.name, "notify"))
        self.wakeups.notified(now, reading=self.reading)
        self.advance(now)

    def read_failed(self, error: str, now: float) -> None:
        """The database did not answer: again after a backoff, said once."""
        if self.database_error is None:
            self.ctx.tell(h.ClaimingFailed(self.name, error))
        self.database_error = error
        self._claim_failures += 1
        timing = self.timing
        delay = min(timing.claim_backoff_max_s, timing.claim_backoff_base_s * 2.0 ** min(self._claim_failures - 1, 16))
        self.claim_not_before = now + delay * (0.5 + self.ctx.uniform() / 2)
        self.wakeups.hungry = True

    def heard_of_database(self, error: str | None, now: float) -> None:
        """What else than a read says of the database: None, it answers, so that a read need not wait any longer."""
        self.unheard = error
        if error is None and self.claim_not_before > now:
            self.claim_not_before = 0.0
            self.sooner(now)

    def read_succeeded(self) -> None:
        if self.database_error is not None:
            self.ctx.tell(h.ClaimingRecovered(self.name))
        self.database_error = None
        self._claim_failures = 0
        self.claim_not_before = 0.0

    @property
    def may_read(self) -> bool:
        return not (self.ctx.draining or self.paused or self.pool.restarts.parked is not None)

    # --- control ----------------------------------------------------------------------------------------------------

    def pause(self, paused: bool, now: float) -> None:
        if paused == self.paused:
            return
        self.paused = paused
        if paused:
            self.ctx.tell(h.QueuePaused(self.name))
            self.give_back_waiting(now, "paused")
        else:
            self.ctx.tell(h.QueueResumed(self.name))
            self.wakeups.hungry = True
            self.advance(now)

    def cancel(self, msg_id: int, now: float) -> bool:
        """Stop request, then TERM, then KILL; False when no child of ours has the message."""
        for child in self.pool.children.values():
            delivery = child.delivery
            if delivery is not None and delivery.msg_id == msg_id and delivery.state in _STOPPABLE:
                self.limits.stop(child, delivery, StopReason.CANCELLED, now)
                return True
        return False

    # --- shutdown ---------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """`ctx.draining` is set. No new work; what runs is asked to stop and may finish."""
        self.give_back_waiting(now, "drain")
        for child in list(self.pool.children.values()):
            delivery = child.delivery
            if child.state in (ChildState.IDLE, ChildState.STARTING):
                self.pool.retire(child, now)
            elif delivery is not None and child.state is ChildState.BUSY:
                self.limits.stop(child, delivery, StopReason.SHUTDOWN, now)

    def kill_all(self, now: float) -> int:
        """Acks are off; everything alive is killed. Returns how many had a message in hand."""
        killed = 0
        for child in list(self.pool.children.values()):
            if child.state in (ChildState.KILLED, ChildState.UNKILLABLE, ChildState.GONE) or self.spare(child, now):
                continue
            works = child.delivery is not None and child.delivery.state is not DeliveryState.PERMITTED
            killed += works
            self.pool.kill(child, now, DeathCause.SHUTDOWN if works else DeathCause.RETIRED, with_stack=works)
        return killed

    def spare(self, _child: Child, _now: float) -> bool:
        """Whether a child is not killed yet when everything else is; asked again, it is."""
        return False

    # --- time -------------------------------------------------------------------------------------------------------

    def stood_still(self, seconds: float) -> None:
        """Nobody is late whom we could not hear. Deadlines of answers move; leases and limits of handlers do not."""
        for child in self.pool.children.values():
            child.deadline += seconds
            delivery = child.delivery
            if delivery is not None and delivery.state in _AWAITED:
                delivery.dispatched_at += seconds
                delivery.decided_at += seconds

    def tick(self, now: float) -> None:
        """Carry out what is due, and set `next_at`."""
        self.next_at = inf
        self.sooner(self.pool.tick(now))
        for child in self.pool.given_up:
            self.unkillable(child, now)
        self.pool.given_up.clear()
        for child in list(self.pool.children.values()):
            self.sooner(self.limits.check(child, now))
        source = self.wakeups.passed(now)
        if source is not None:
            self.ctx.tell(h.WokenUp(self.name, source))
        if self.pool.restarts.parked is not None:
            self.give_back_waiting(now, "parked")
        self.tick_mode(now)
        self.advance(now)
        if self.may_read:
            self.sooner(self.wakeups.next_deadline())
            if self.claim_not_before > now:
                self.sooner(self.claim_not_before)

    def sooner(self, deadline: float) -> None:
        """Something new is due at `deadline`."""
        self.next_at = min(self.next_at, deadline)

    # --- snapshot ---------------------------------------------------------------------------------------------------

    def _snapshot(self, now: float, *, waiting: int, settling: int, owed: int, **more: float | None) -> QueueSnapshot:
        deliveries = self.held()
        return QueueSnapshot(
            queue=self.name,
            mode=str(self.settings.mode),
            handler=self.settings.handler,
            concurrency=self.settings.concurrency,
            paused=self.paused,
            parked=self.pool.restarts.parked,
            waiting=waiting,
            in_flight=len(deliveries),
            settling=settling,
            owed=owed,
            held_bytes=sum(d.body_bytes for d in deliveries if d.body is not None),
            claims_attempted_at=self.claims_attempted_at,
            database_error=self.database_error or self.unheard,
            listener_up=self.listener_up,
            lease_margin_s=min((d.lease_deadline - now for d in deliveries if d.lease_deadline), default=None),
            overdue_renewals=int(more.get("overdue") or 0),
            handler_ewma_s=more.get("estimate"),
            children=tuple(_child_snapshot(child) for child in self.pool.children.values()),
        )

    @abstractmethod
    def snapshot(self, now: float) -> QueueSnapshot: ...


_AWAITED = frozenset({DeliveryState.DISPATCHED, DeliveryState.PERMITTED, DeliveryState.CLAIMED, DeliveryState.DECIDED})
_STOPPABLE = frozenset({DeliveryState.DISPATCHED, DeliveryState.RUNNING, DeliveryState.CLAIMED})


def _child_snapshot(child: Child) -> ChildSnapshot:
    delivery = child.delivery
    working = delivery is not None and delivery.msg_id != 0
    return ChildSnapshot(
        child=child.id,
        slot=child.slot,
        incarnation=child.incarnation,
        role="successor" if child.successor_of is not None else "active",
        state=str(child.state),
        pid=child.pid or None,
        since=child.spawned_at,
        messages=child.messages,
        msg_id=delivery.msg_id if delivery is not None and working else None,
        attempt=delivery.attempt if delivery is not None and working else None,
        running_since=delivery.started_at if delivery is not None else None,
        stop_reason=str(delivery.stop_reason) if delivery is not None and delivery.stop_reason else None,
        progress=delivery.progress if delivery is not None else None,
        tree_bytes=child.tree_bytes,
    )

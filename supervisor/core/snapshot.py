"""What `Core.snapshot()` returns: the state of everything at one instant, for status, top, /api/status and gauges.

All times are CLOCK_BOOTTIME seconds as given to the core; the shell turns them into ages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSnapshot:
    child: int
    slot: int
    incarnation: int
    role: str  # "active" | "spare" | "successor"
    state: str  # a ChildState
    pid: int | None
    since: float  # when it was spawned
    messages: int  # finished by this process
    msg_id: int | None
    attempt: int | None
    running_since: float | None
    stop_reason: str | None
    progress: str | None
    tree_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    queue: str
    mode: str
    handler: str
    concurrency: int
    paused: bool
    parked: str | None  # why
    waiting: int  # claimed, not dispatched
    in_flight: int  # claimed and not yet settled, waiting included
    settling: int
    owed: int  # transactional: charges not yet in the database
    held_bytes: int
    claims_attempted_at: float | None
    database_error: str | None
    listener_up: bool
    lease_margin_s: float | None  # shortest time to a lease deadline among what is held
    overdue_renewals: int
    handler_ewma_s: float | None
    children: tuple[ChildSnapshot, ...]

    @property
    def ready_children(self) -> int:
        """Children that can take a message or run one."""
        return sum(1 for c in self.children if c.state in ("idle", "busy", "reserved"))

    @property
    def not_ready_because(self) -> str | None:
        """None when the queue has its children and a database."""
        if self.parked:
            return f"parked: {self.parked}"
        if self.database_error:
            return f"database: {self.database_error}"
        if self.claims_attempted_at is None and not self.paused:
            return "nothing was read from the database yet"
        if self.ready_children < self.concurrency:
            return f"{self.ready_children} of {self.concurrency} children are ready"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    state: str  # "starting" | "running" | "draining" | "killing" | "stopped"
    now: float
    started_at: float
    reloading: bool
    queues: tuple[QueueSnapshot, ...]

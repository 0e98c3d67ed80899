"""What the core must know of the configuration: plain values in seconds and bytes, already validated."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.pgmq.records import AckMode
from supervisor.core.types import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Delay before attempt n+1: base * factor^(n-1), at most max_s, times U[0.5, 1] with jitter."""

    base_s: float = 1.0
    factor: float = 2.0
    max_s: float = 600.0
    jitter: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    name: str
    handler: str  # "package.module:function"
    dead_letter_queue: str
    mode: Mode = Mode.REGULAR
    concurrency: int = 1
    standby: int = 0
    visibility_timeout_s: float = 30.0
    soft_timeout_s: float | None = None
    hard_timeout_s: float | None = 1800.0
    memory_limit_bytes: int | None = None
    max_tasks_per_child: int | None = None
    max_child_age_s: float | None = None
    claim_batch_size: int = 100
    max_in_flight: int | None = None  # None: "auto"
    polling_interval_s: float = 5.0
    notify: bool = True
    on_success: AckMode = AckMode.DELETE
    max_attempts: int = 5
    max_deaths: int = 3
    retry: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Limits that are not the user's business, in one place so that the simulator can vary them. Seconds."""

    ready_deadline_s: float = 60.0  # spawn to READY: imports may be slow, a hang must end
    dispatch_deadline_s: float = 5.0  # dispatch to STARTED
    permit_slack_s: float = 10.0  # a session that has to be opened first may take so long
    commit_slack_s: float = 5.0
    term_step_s: float = 1.0  # stop request to TERM, in the ladder of cancel
    cancel_kill_s: float = 5.0  # stop request to KILL, in the ladder of cancel
    unkillable_s: float = 5.0  # KILL to giving the slot up
    exit_deadline_s: float = 5.0  # EXIT to KILL, for a child that retires
    hold_ahead_s: float = 0.05  # work held ahead for each child
    hold_limit_s: float = 5.0  # what waits longer than this is released
    throttle_s: float = 0.25  # PGMQ's notification throttle; leading edge, so read once more after it
    boot_backoff_base_s: float = 0.5
    boot_backoff_max_s: float = 30.0
    boot_attempts: int = 3  # definite boot failures in a row before the queue is parked
    boot_intensity: int = 8  # boot failures or idle deaths ...
    boot_period_s: float = 60.0  # ... within this, and the queue is parked
    park_retry_s: float = 60.0
    claim_backoff_base_s: float = 0.2
    claim_backoff_max_s: float = 10.0
    gather_acks_s: float = 0.01  # acknowledgements of work that is quicker wait so long for each other (ADR 0024)
    settle_backoff_base_s: float = 0.1
    settle_backoff_max_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    queues: tuple[QueueSettings, ...]
    host: str
    supervisor: str  # a name for this supervisor process, unique in time: goes into dead letters
    version: str
    grace_s: float = 30.0
    kill_after_s: float = 5.0
    max_held_bytes: int = 64 << 20  # bodies waiting in the parent, over all queues
    statement_timeout_s: float = 30.0  # what the server allows each statement of a child that is not its handler's
    timing: Timing = field(default_factory=Timing)

    @property
    def permit_deadline_s(self) -> float:
        """Permit to an answer: the claim, and what is asked after it. The server's limits are met first."""
        return 2 * self.statement_timeout_s + self.timing.permit_slack_s

    @property
    def commit_deadline_s(self) -> float:
        """Verdict to COMMITTED or TX_ENDED: the settlement, and COMMIT."""
        return 2 * self.statement_timeout_s + self.timing.commit_slack_s

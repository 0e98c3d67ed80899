"""Happenings: the typed stream that log, metrics and the user's sink receive. Facts after the fact, no bodies.

Those made for every message are not frozen: freezing triples the cost of making one. Nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.core.types import ChildId, DeadLetterReason, DeathCause, DeathFacts, ErrorInfo, QueueName


@dataclass(frozen=True, slots=True)
class MessagesClaimed:
    queue: QueueName
    count: int


@dataclass(slots=True)  # hot: see the module's note
class MessageStartedRunning:
    queue: QueueName
    msg_id: int
    attempt: int
    child: ChildId
    pid: int
    wait_s: float | None  # since it was visible, by the database's clock; None in transactional mode


@dataclass(slots=True)  # hot: see the module's note
class MessageSucceeded:
    """Settled: PostgreSQL said so."""

    queue: QueueName
    msg_id: int
    attempt: int
    handler_s: float
    settle_s: float


@dataclass(frozen=True, slots=True)
class MessageRetried:
    queue: QueueName
    msg_id: int
    attempt: int
    reason: str  # "error" | "requested" | "soft_timeout" | a DeathCause | "deadlock"
    delay_ms: int
    error: ErrorInfo | None
    handler_s: float | None


@dataclass(frozen=True, slots=True)
class MessageDeadLettered:
    queue: QueueName
    msg_id: int
    attempt: int
    reason: DeadLetterReason
    error: ErrorInfo | None
    handler_s: float | None


@dataclass(frozen=True, slots=True)
class MessageAbandoned:
    queue: QueueName
    msg_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class MessageReleased:
    queue: QueueName
    msg_id: int
    reason: str  # "drain" | "slow" | "paused" | "shutdown" | "not_started" | "lease_lost" | "deadlock"


@dataclass(frozen=True, slots=True)
class SettlementFailed:
    """An error; tried again inside the lease."""

    queue: QueueName
    msg_id: int
    error: str


@dataclass(frozen=True, slots=True)
class SettlementLapsed:
    """Given up: the lease ran out, or the row was not ours any more. The message returns, or was settled unheard."""

    queue: QueueName
    msg_id: int
    wanted: str
    why: str


@dataclass(frozen=True, slots=True)
class LeasesRenewed:
    queue: QueueName
    count: int


@dataclass(frozen=True, slots=True)
class LeaseRenewalFailed:
    queue: QueueName
    error: str


@dataclass(frozen=True, slots=True)
class LeaseLost:
    queue: QueueName
    msg_id: int
    why: str


@dataclass(frozen=True, slots=True)
class ClaimingFailed:
    queue: QueueName
    error: str


@dataclass(frozen=True, slots=True)
class ClaimingRecovered:
    queue: QueueName


@dataclass(frozen=True, slots=True)
class WokenUp:
    queue: QueueName
    source: str  # "notify" | "poll" | "timer"


@dataclass(frozen=True, slots=True)
class ChildStarting:
    queue: QueueName
    child: ChildId
    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ChildBecameReady:
    queue: QueueName
    child: ChildId
    slot: int
    pid: int
    boot_s: float


@dataclass(frozen=True, slots=True)
class ChildFailedToStart:
    queue: QueueName
    child: ChildId
    slot: int
    error: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class ChildStopping:
    """A kill was decided."""

    queue: QueueName
    child: ChildId
    pid: int
    cause: DeathCause
    msg_id: int | None


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """Every end of a child. `msg_id`: the message in its hands, None when idle or retired."""

    queue: QueueName
    child: ChildId
    slot: int
    pid: int
    cause: DeathCause
    facts: DeathFacts
    msg_id: int | None
    attempt: int | None
    charged: bool


@dataclass(frozen=True, slots=True)
class ChildUnkillable:
    queue: QueueName
    child: ChildId
    pid: int


@dataclass(frozen=True, slots=True)
class HandlerProgress:
    queue: QueueName
    msg_id: int
    text: str


@dataclass(frozen=True, slots=True)
class QueueParked:
    queue: QueueName
    why: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class QueueUnparked:
    queue: QueueName


@dataclass(frozen=True, slots=True)
class QueuePaused:
    queue: QueueName


@dataclass(frozen=True, slots=True)
class QueueResumed:
    queue: QueueName


@dataclass(frozen=True, slots=True)
class CommitInDoubt:
    """Transactional: outcome of a COMMIT unknown, or decided later (`outcome`)."""

    queue: QueueName
    msg_id: int
    outcome: str  # "unknown" | "committed" | "rolled_back"


@dataclass(frozen=True, slots=True)
class ChargeOwed:
    """Transactional: the row is in somebody else's hands; the charge is applied when it is seen again."""

    queue: QueueName
    msg_id: int


@dataclass(frozen=True, slots=True)
class ReloadStarted:
    pass


@dataclass(frozen=True, slots=True)
class ReloadEnded:
    failed: str | None  # why the old code stays


@dataclass(frozen=True, slots=True)
class ShutdownStarted:
    in_flight: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ShutdownEscalated:
    why: str  # "grace" | "signal"
    killed: int


@dataclass(frozen=True, slots=True)
class ShutdownEnded:
    timed_out: bool
    killed: int
    took_s: float


Happening = (
    MessagesClaimed
    | MessageStartedRunning
    | MessageSucceeded
    | MessageRetried
    | MessageDeadLettered
    | MessageAbandoned
    | MessageReleased
    | SettlementFailed
    | SettlementLapsed
    | LeasesRenewed
    | LeaseRenewalFailed
    | LeaseLost
    | ClaimingFailed
    | ClaimingRecovered
    | WokenUp
    | ChildStarting
    | ChildBecameReady
    | ChildFailedToStart
    | ChildStopping
    | ChildEnded
    | ChildUnkillable
    | HandlerProgress
    | QueueParked
    | QueueUnparked
    | QueuePaused
    | QueueResumed
    | CommitInDoubt
    | ChargeOwed
    | ReloadStarted
    | ReloadEnded
    | ShutdownStarted
    | ShutdownEscalated
    | ShutdownEnded
)

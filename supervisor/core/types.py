"""Names and small values that the whole core uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from shared.pgmq.records import AckMode

QueueName = NewType("QueueName", str)
ChildId = NewType("ChildId", int)  # one process; never reused within a supervisor's life (an incarnation)
ClaimId = NewType("ClaimId", int)  # one delivery; also the `seq` of its frames


class Mode(StrEnum):
    REGULAR = "regular"
    TRANSACTIONAL = "transactional"


class StopReason(StrEnum):
    """Why a running message is asked to stop."""

    SOFT_TIMEOUT = "soft_timeout"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"


class DeathCause(StrEnum):
    """Why a child ended: what the parent decided before it signalled, else what the wait status says."""

    SIGNAL = "signal"
    EXIT = "exit"
    HARD_TIMEOUT = "hard_timeout"
    MEMORY_LIMIT = "memory_limit"
    OOM = "oom"
    LEASE_LOST = "lease_lost"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol"
    UNRESPONSIVE = "unresponsive"
    RETIRED = "retired"  # we asked it to end: recycled, reloaded, drained; not a death of a message


CHARGED_CAUSES = frozenset(
    {
        DeathCause.SIGNAL,
        DeathCause.EXIT,
        DeathCause.HARD_TIMEOUT,
        DeathCause.MEMORY_LIMIT,
        DeathCause.OOM,
        DeathCause.PROTOCOL,
    }
)


class DeadLetterReason(StrEnum):
    REJECTED = "rejected"
    FAILED = "failed"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    DIED = "died"
    HARD_TIMEOUT = "hard_timeout"
    MEMORY_LIMIT = "memory_limit"
    INVALID_MESSAGE = "invalid_message"
    CANCELLED = "cancelled"


class OutcomeKind(StrEnum):
    """What a handler did, as its child reports it."""

    SUCCESS = "success"
    RETRY = "retry"
    REJECT = "reject"
    ABANDON = "abandon"
    ERROR = "error"  # any exception; `permanent` when it has that true attribute, or asked for an impossible delay
    INVALID_MESSAGE = "invalid_message"
    STOPPED = "stopped"  # raise_if_stopped() raised and nobody caught it


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An exception, as text. Cleaned and cut by the child; cleaned again before it goes into SQL."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A handler's end. `sqlstate` only in transactional mode: 40001 and 40P01 are not charged."""

    kind: OutcomeKind
    delay_ms: int | None = None
    ack: AckMode | None = None
    reason: str | None = None
    error: ErrorInfo | None = None
    permanent: bool = False
    sqlstate: str | None = None


SUCCESS = Outcome(OutcomeKind.SUCCESS)


@dataclass(frozen=True, slots=True)
class DeathFacts:
    """What the operating system told about a child's end, and what the child left."""

    exit_code: int | None
    signal: str | None  # "SIGSEGV"
    max_rss_kb: int
    cpu_s: float
    stack: str
    output_tail: str
    oom: bool = False  # the kernel's out-of-memory killer
    by_guard: bool = False  # its lease ran out while this supervisor stood still


@dataclass(frozen=True, slots=True)
class TxIdentity:
    """Which transaction a transactional child works in; enough to terminate exactly that one."""

    xid: int | None
    backend_pid: int
    backend_start_us: int

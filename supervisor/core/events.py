"""Events: what happened outside, told to the core. Past participles; times are CLOCK_BOOTTIME seconds.

Those made for every message are not frozen: freezing triples the cost of making one. Nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.pgmq.records import ClaimedRow, ReckonOutcome, RenewResult, SettleResult
from supervisor.core.types import ChildId, ClaimId, DeathFacts, ErrorInfo, Outcome, QueueName, TxIdentity


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A deadline may have come. Every event does the same; this one says nothing else."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The process was frozen or starved for so long: answers may have come that it has not read yet."""

    seconds: float


# --- database -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to `Claim`. `asked_at` is the time before the query: leases count from there."""

    queue: QueueName
    asked: int
    asked_at: float
    rows: tuple[ClaimedRow, ...]
    next_visible_s: float | None  # only looked up when rows is empty; None: nothing is delayed
    full: bool = False  # as many as could be asked for: there may be more


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    queue: QueueName
    error: str


@dataclass(frozen=True, slots=True)
class BodyFetched:
    """Answer to `FetchBody`. found False: the row is gone or the fence does not match."""

    queue: QueueName
    claim_id: ClaimId
    found: bool
    body: bytes | None


@dataclass(frozen=True, slots=True)
class BodyFetchFailed:
    queue: QueueName
    claim_id: ClaimId
    error: str
    permanent: bool = False  # this body will never be read: too large as text, damaged


@dataclass(frozen=True, slots=True)
class Renewed:
    queue: QueueName
    asked_at: float
    results: tuple[RenewResult, ...]


@dataclass(frozen=True, slots=True)
class RenewFailed:
    queue: QueueName
    error: str


@dataclass(slots=True)  # hot: see the module's note
class Settled:
    """Answers for some or all items of one or more `Settle` commands."""

    queue: QueueName
    results: tuple[SettleResult, ...]


@dataclass(frozen=True, slots=True)
class Reckoned:
    """Answer to `Reckon` for one attempt."""

    queue: QueueName
    claim_id: ClaimId
    outcome: ReckonOutcome
    error: str | None = None
    committed: bool | None = None  # what the server says of the attempt's own transaction; None: it does not know


@dataclass(frozen=True, slots=True)
class Notified:
    queue: QueueName


@dataclass(frozen=True, slots=True)
class ListenerUp:
    """LISTEN stands (again) for these queues: read all, what came meanwhile was not heard."""

    queues: tuple[QueueName, ...]


@dataclass(frozen=True, slots=True)
class ListenerDown:
    error: str


# --- children -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildSpawned:
    child: ChildId
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    child: ChildId
    error: str


@dataclass(frozen=True, slots=True)
class ChildReady:
    child: ChildId
    rss_kb: int


@dataclass(frozen=True, slots=True)
class ChildBootFailed:
    """The child says why it cannot start; its end follows."""

    child: ChildId
    kind: str  # "import" | "missing" | "signature" | "database"
    error: str
    traceback: str


@dataclass(slots=True)  # hot: see the module's note
class MessageStarted:
    child: ChildId
    claim_id: ClaimId


@dataclass(slots=True)  # hot: see the module's note
class MessageFinished:
    child: ChildId
    claim_id: ClaimId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ProgressReported:
    child: ChildId
    claim_id: ClaimId
    text: str


@dataclass(frozen=True, slots=True)
class ChildDied:
    """Reaped, with its whole tree. Everything that it had written before was told in events before this one."""

    child: ChildId
    facts: DeathFacts


@dataclass(frozen=True, slots=True)
class ProtocolBroken:
    """The child sent what is no frame, or a frame that makes no sense."""

    child: ChildId
    error: str


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """Memory of a child's process tree (PSS once the RSS sum is over the limit)."""

    child: ChildId
    tree_bytes: int


# --- transactional --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PermitEmpty:
    child: ChildId
    claim_id: ClaimId
    next_visible_s: float | None


@dataclass(frozen=True, slots=True)
class TransactionClaimed:
    """A child claimed inside its transaction. read_ct is the value after the claim, uncommitted."""

    child: ChildId
    claim_id: ClaimId
    msg_id: int
    read_ct: int
    enqueued_us: int
    visible_us: int
    accounts: str | None
    tx: TxIdentity
    touched: bool = False  # whoever had it before did not commit: the child waits for `AnswerClaim`
    read_at_us: int = 0  # last_read_at that the claim wrote: with msg_id and read_ct its fence, where it was committed


@dataclass(frozen=True, slots=True)
class CommitRequested:
    child: ChildId
    claim_id: ClaimId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Committed:
    child: ChildId
    claim_id: ClaimId


@dataclass(frozen=True, slots=True)
class TransactionEnded:
    """No commit that the child knows of. in_doubt: COMMIT was sent and its answer did not come."""

    child: ChildId
    claim_id: ClaimId
    error: ErrorInfo | None
    sqlstate: str | None
    in_doubt: bool
    claimed: bool  # False: the claim itself failed (database away), nothing to reckon
    outcome: Outcome | None = None  # what the handler asked for, where it was not a success


# --- control --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The shell is up: start children."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """First TERM or INT, or POST /api/drain."""


@dataclass(frozen=True, slots=True)
class EscalationRequested:
    """A second signal more than 1 s after the first: kill children now."""


@dataclass(frozen=True, slots=True)
class ReloadRequested:
    """HUP."""


@dataclass(frozen=True, slots=True)
class PauseChanged:
    queue: QueueName
    paused: bool


@dataclass(frozen=True, slots=True)
class CancelRequested:
    queue: QueueName
    msg_id: int


Event = (
    TimePassed
    | StoodStill
    | Claimed
    | ClaimFailed
    | BodyFetched
    | BodyFetchFailed
    | Renewed
    | RenewFailed
    | Settled
    | Reckoned
    | Notified
    | ListenerUp
    | ListenerDown
    | ChildSpawned
    | SpawnFailed
    | ChildReady
    | ChildBootFailed
    | MessageStarted
    | MessageFinished
    | ProgressReported
    | ChildDied
    | ProtocolBroken
    | MemoryMeasured
    | PermitEmpty
    | TransactionClaimed
    | CommitRequested
    | Committed
    | TransactionEnded
    | Started
    | ShutdownRequested
    | EscalationRequested
    | ReloadRequested
    | PauseChanged
    | CancelRequested
)

"""Commands: what the shell must do now. Imperatives. The shell carries them out in order and decides nothing.

The core's answer to an event is a list of them, with the happenings that are to be told in between.

Those made for every message are not frozen: freezing triples the cost of making one. Nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.pgmq.records import Fence, Reckoning, SettleItem, Settlement
from supervisor.core.happenings import Happening
from supervisor.core.types import ChildId, ClaimId, QueueName, StopReason, TxIdentity

# --- database -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim up to `limit` messages. Exactly one `Claimed` or `ClaimFailed` answers."""

    queue: QueueName
    limit: int
    lease_s: float
    byte_budget: int


@dataclass(frozen=True, slots=True)
class FetchBody:
    """Load the body of a claimed message that was too large to come with its claim."""

    queue: QueueName
    claim_id: ClaimId
    fence: Fence


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew these leases. Exactly one `Renewed` or `RenewFailed` answers, within `timeout_s`."""

    queue: QueueName
    fences: tuple[tuple[ClaimId, Fence], ...]
    lease_s: float
    timeout_s: float


@dataclass(slots=True)  # hot: see the module's note
class Settle:
    """Carry out verdicts. One `SettleResult` answers each item. Items may be batched with others."""

    queue: QueueName
    items: tuple[SettleItem, ...]


@dataclass(frozen=True, slots=True)
class Reckon:
    """Settle a transactional attempt whose commit we did not hear of. `Reckoned` answers."""

    queue: QueueName
    claim_id: ClaimId
    reckoning: Reckoning
    tx: TxIdentity | None  # to name the outcome of its transaction, and to know its session


@dataclass(frozen=True, slots=True)
class TerminateBackend:
    """End the server session of a killed child, only if it is still in that transaction."""

    queue: QueueName
    tx: TxIdentity


# --- children -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartChild:
    """Spawn a process. `ChildSpawned` or `SpawnFailed` answers, later `ChildReady`, at the end `ChildDied`."""

    child: ChildId
    queue: QueueName
    slot: int
    incarnation: int


@dataclass(slots=True)  # hot: see the module's note
class Dispatch:
    """Hand a message to an idle child. The guard kills the child when `lease_deadline` passes unrenewed."""

    child: ChildId
    claim_id: ClaimId
    msg_id: int
    attempt: int
    deliveries: int
    enqueued_us: int
    hard_timeout_s: float | None  # for time_left() only: `limits` holds the child to it
    headers: bytes | None
    body: bytes | None
    lease_deadline: float


@dataclass(frozen=True, slots=True)
class GuardLeases:
    """New lease deadlines of running children, for the guard. 0: no deadline."""

    deadlines: tuple[tuple[ChildId, float], ...]


@dataclass(frozen=True, slots=True)
class SendStop:
    """Ask the running handler to stop: a frame that `message.stop_requested` sees."""

    child: ChildId
    claim_id: ClaimId
    reason: StopReason


@dataclass(frozen=True, slots=True)
class SendTerm:
    """The TERM step of the ladder: SIGTERM to the child's leader."""

    child: ChildId


@dataclass(frozen=True, slots=True)
class SendExit:
    """Ask an idle child to end in order."""

    child: ChildId


@dataclass(frozen=True, slots=True)
class KillChild:
    """SIGKILL the child and everything that it started; with_stack: write down all Python stacks before."""

    child: ChildId
    with_stack: bool


@dataclass(frozen=True, slots=True)
class AbandonChild:
    """Killed and not dead: the slot is given up. The shell keeps watching the pidfd, loudly."""

    child: ChildId


# --- transactional --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantPermit:
    """Let a child open one transaction and claim one message in it.

    `owed`: (msg_id, attempts, deaths) that are charged but not yet in the database, so that the child counts right.
    """

    child: ChildId
    claim_id: ClaimId
    time_limit_s: float | None  # hard_timeout: bounds the session's statement and idle limits
    owed: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class AnswerClaim:
    """Whether the handler may begin, where the child asks: for a message that somebody had before. No: roll back.

    With `postpone_ms` nobody shall have the message before that time has passed, unless its charge says otherwise.
    """

    child: ChildId
    claim_id: ClaimId
    go: bool
    postpone_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerCommit:
    """The verdict for a COMMIT_REQUEST. None refuses: roll all back."""

    child: ChildId
    claim_id: ClaimId
    settlement: Settlement | None
    keep_work: bool  # True only for a success: release the savepoint; else back to it first
    read_ct: int | None = None  # absolute value to write with a Retry, where earlier charges were owed


# --- others ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exit:
    """Everything is over: close and leave with this code."""

    code: int


Command = (
    Claim
    | FetchBody
    | Renew
    | Settle
    | Reckon
    | TerminateBackend
    | StartChild
    | Dispatch
    | GuardLeases
    | SendStop
    | SendTerm
    | SendExit
    | KillChild
    | AbandonChild
    | GrantPermit
    | AnswerClaim
    | AnswerCommit
    | Exit
)

Answer = list[Command | Happening]
"""What the core says to an event."""

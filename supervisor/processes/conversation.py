"""The parent's half of the protocol without I/O: frames of one child in, events out, nonsense refused.

    booting ─READY─▶ idle ─(dispatch)─▶ handed ─(start mark)─▶ running ─SUCCESS|RESULT─▶ idle
                     idle ─(permit)──▶ permitted ─TX_CLAIMED─▶ claimed ─STARTED─▶ working ─COMMIT_REQUEST─▶ asked
                     asked ─(verdict)─▶ answered ─COMMITTED─▶ idle          any of these ─TX_ENDED─▶ idle

A result may come before anybody has looked at the mark. The table says which frame may come when; a frame that is not
in it breaks the protocol, whatever the handler did to our descriptor. PROGRESS, LOG and SWEPT may come at any time and
change nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final, NamedTuple

from shared.wire.frames import Frame, Kind, ProtocolError
from supervisor.core.events import (
    ChildBootFailed,
    ChildReady,
    CommitRequested,
    Committed,
    Event,
    MessageFinished,
    MessageStarted,
    PermitEmpty,
    ProgressReported,
    TransactionClaimed,
    TransactionEnded,
)
from supervisor.core.types import SUCCESS, ChildId, ClaimId
from supervisor.processes import outcomes


class State(Enum):
    """Where the conversation stands."""

    BOOTING = auto()
    FAILED = auto()
    IDLE = auto()
    HANDED = auto()
    RUNNING = auto()
    PERMITTED = auto()
    CLAIMED = auto()
    WORKING = auto()
    ASKED = auto()
    ANSWERED = auto()


_MAX_SWEPT: Final = 100_000
_NEXT: Final[dict[tuple[State, Kind], State]] = {
    (State.BOOTING, Kind.READY): State.IDLE,
    (State.BOOTING, Kind.BOOT_FAILED): State.FAILED,
    (State.HANDED, Kind.SUCCESS): State.IDLE,
    (State.HANDED, Kind.RESULT): State.IDLE,
    (State.RUNNING, Kind.SUCCESS): State.IDLE,
    (State.RUNNING, Kind.RESULT): State.IDLE,
    (State.PERMITTED, Kind.TX_EMPTY): State.IDLE,
    (State.PERMITTED, Kind.TX_CLAIMED): State.CLAIMED,
    (State.PERMITTED, Kind.TX_ENDED): State.IDLE,
    (State.CLAIMED, Kind.STARTED): State.WORKING,
    (State.CLAIMED, Kind.COMMIT_REQUEST): State.ASKED,
    (State.CLAIMED, Kind.TX_ENDED): State.IDLE,
    (State.WORKING, Kind.COMMIT_REQUEST): State.ASKED,
    (State.WORKING, Kind.TX_ENDED): State.IDLE,
    (State.ASKED, Kind.TX_ENDED): State.IDLE,
    (State.ANSWERED, Kind.COMMITTED): State.IDLE,
    (State.ANSWERED, Kind.TX_ENDED): State.IDLE,
}


class LogLine(NamedTuple):
    """`message.log` of the handler: for the log, not for the core."""

    claim_id: ClaimId | None
    level: str
    text: str


class Swept(NamedTuple):
    """Processes that a message left behind and its child killed: to be counted, nothing for the core."""

    number: int


class Conversation:
    """What was said with one child. `claim_id` is the message in its hands, None when there is none."""

    __slots__ = ("child", "claim_id", "state")

    def __init__(self, child: ChildId) -> None:
        """Begin before READY."""
        self.child = child
        self.state = State.BOOTING
        self.claim_id: ClaimId | None = None

    def dispatched(self, claim_id: ClaimId) -> None:
        """A DISPATCH was sent."""
        self.state, self.claim_id = State.HANDED, claim_id

    def permitted(self, claim_id: ClaimId) -> None:
        """A PERMIT was sent."""
        self.state, self.claim_id = State.PERMITTED, claim_id

    def answered(self) -> None:
        """A VERDICT was sent."""
        self.state = State.ANSWERED

    def take(self, frame: Frame) -> Event | LogLine | Swept | None:
        """Translate one frame. None: stale and harmless. Raises `ProtocolError` when it makes no sense here."""
        kind = frame.kind
        if frame.body:
            raise ProtocolError(f"{kind.name} with a body of {len(frame.body)} bytes")
        if kind is Kind.LOG or kind is Kind.PROGRESS or kind is Kind.SWEPT:
            return self._aside(frame)
        following = _NEXT.get((self.state, kind))
        if following is None:
            raise ProtocolError(f"{kind.name} while {self.state.name.lower()}")
        if frame.seq != (self.claim_id or 0):
            raise ProtocolError(f"{kind.name} for {frame.seq}, in hand is {self.claim_id or 0}")
        event = _translate(self.child, ClaimId(frame.seq), kind, frame.meta)
        self.state = following
        if following is State.IDLE:
            self.claim_id = None
        return event

    def _aside(self, frame: Frame) -> Event | LogLine | Swept | None:
        if frame.kind is Kind.SWEPT:
            return Swept(outcomes.integer(frame.meta, "count", 1, _MAX_SWEPT))
        current = frame.seq if frame.seq and frame.seq == self.claim_id else None
        if frame.kind is Kind.LOG:
            claim_id = None if current is None else ClaimId(current)
            return LogLine(claim_id, outcomes.text(frame.meta, "level"), outcomes.text(frame.meta, "text"))
        if current is None:  # a thread that a message left behind
            return None
        return ProgressReported(self.child, ClaimId(current), outcomes.text(frame.meta, "text"))


def _translate(child: ChildId, claim_id: ClaimId, kind: Kind, meta: dict[str, Any]) -> Event:
    match kind:
        case Kind.STARTED:
            return MessageStarted(child, claim_id)
        case Kind.SUCCESS:
            return MessageFinished(child, claim_id, SUCCESS)
        case Kind.RESULT:
            return MessageFinished(child, claim_id, outcomes.parse_outcome(meta))
        case Kind.READY:
            return ChildReady(child, outcomes.integer(meta, "rss_kb", 0, 1 << 50))
        case Kind.BOOT_FAILED:
            parts = (outcomes.text(meta, key) for key in ("kind", "error", "traceback"))
            return ChildBootFailed(child, *parts)
        case Kind.TX_EMPTY:
            return PermitEmpty(child, claim_id, outcomes.optional_seconds(meta, "next_visible_s"))
        case Kind.TX_CLAIMED:
            return TransactionClaimed(
                child=child,
                claim_id=claim_id,
                msg_id=outcomes.integer(meta, "msg_id", -outcomes.MAX_INT64 - 1, outcomes.MAX_INT64),
                read_ct=outcomes.integer(meta, "read_ct", -(1 << 31), (1 << 31) - 1),
                enqueued_us=outcomes.integer(meta, "enqueued_us", -outcomes.MAX_INT64, outcomes.MAX_INT64),
                visible_us=outcomes.integer(meta, "visible_us", -outcomes.MAX_INT64, outcomes.MAX_INT64),
                accounts=outcomes.optional_text(meta, "accounts"),
                tx=outcomes.parse_transaction(meta),
                touched=outcomes.boolean(meta, "touched"),
                read_at_us=outcomes.integer(meta, "read_us", -outcomes.MAX_INT64, outcomes.MAX_INT64),
            )
        case Kind.COMMIT_REQUEST:
            return CommitRequested(child, claim_id, outcomes.parse_outcome(meta))
        case Kind.COMMITTED:
            return Committed(child, claim_id)
        case Kind.TX_ENDED:
            return TransactionEnded(
                child=child,
                claim_id=claim_id,
                error=outcomes.optional_error(meta, "error"),
                sqlstate=outcomes.optional_text(meta, "sqlstate"),
                in_doubt=outcomes.boolean(meta, "in_doubt"),
                claimed=outcomes.boolean(meta, "claimed"),
                outcome=outcomes.parse_outcome(meta) if meta.get("kind") is not None else None,
            )
        case _:
            raise ProtocolError(f"{kind.name} from a child")

"""One delivery of one message, or in transactional mode one attempt from its permit on. Mutable, owned by its queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared.pgmq.records import Fence, Settlement
from supervisor.core.accounts import CLEAN, Accounts
from supervisor.core.states import DeliveryState, check_delivery
from supervisor.core.types import ClaimId, DeadLetterReason, DeathCause, DeathFacts, ErrorInfo, StopReason, TxIdentity

_NO_FENCE: Final = Fence(0, 0, 0)


@dataclass(slots=True, frozen=True)
class Verdict:
    """What policy decided. `settlement` None: leave it to its lease (abandon), or nothing to do."""

    settlement: Settlement | None
    kind: str  # "success" | "retry" | "dead_letter" | "release" | "abandon"
    reason: str = ""
    delay_ms: int = 0
    error: ErrorInfo | None = None
    dead_letter_reason: DeadLetterReason | None = None
    charged: bool = False  # a death was charged
    accounts: Accounts | None = None  # what the settlement writes


class Delivery:
    """What differs from message to message is set when it is made; the rest are defaults until something happens."""

    accounts: Accounts = CLEAN
    stored: Accounts = CLEAN  # what the database has of them
    attempt = 1
    lease_deadline = 0.0
    renew_at = 0.0
    headers: bytes | None = None
    body: bytes | None = None
    body_loaded = True
    body_bytes = 0
    enqueued_us = 0
    visible_us = 0
    dispatched_at = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    fence_lost = False  # a renewal matched no row: nothing of ours may touch it any more
    verdict: Verdict | None = None
    decided_at = 0.0
    settle_tries = 0
    settle_at: float | None = None  # when to try again; None: the settler has it
    unheard = False  # a try did not reach the database, or its answer did not reach us
    lingers = False  # a refund that outlives its lease: fence only
    # what happened while it ran
    stop_reason: StopReason | None = None
    stop_at = 0.0
    progress: str | None = None
    # transactional
    tx: TxIdentity | None = None
    reckon_tries = 0
    death: tuple[DeathCause, DeathFacts] | None = None
    extra = 0  # attempts owed when it was claimed
    granted: Verdict | None = None
    held_until: float | None = None  # its child waits for what becomes of another attempt at the same message
    in_doubt = False  # a granted commit of which nobody heard
    spared_until: float | None = None  # not killed before, although everything else is
    reckoned_busy_since: float | None = None

    def __init__(self, claim_id: ClaimId, state: DeliveryState, claimed_at: float, fence: Fence = _NO_FENCE) -> None:
        self.id = claim_id
        self.state = state
        self.claimed_at = claimed_at
        self.fence = fence

    @property
    def msg_id(self) -> int:
        return self.fence.msg_id

    def move(self, state: DeliveryState) -> None:
        check_delivery(self.state, state)
        self.state = state

"""Values that travel between the core and PostgreSQL. No I/O, no driver."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Fence(NamedTuple):
    """Proof of ownership of one delivery. `read_at_us` is `last_read_at` in microseconds since the epoch.

    read_ct alone is not enough: a server crash or failover that loses a claim makes it repeat.
    """

    msg_id: int
    read_ct: int
    read_at_us: int


class ClaimedRow(NamedTuple):
    """One claimed message, as PostgreSQL returned it. Bodies are text in UTF-8 bytes, never parsed by the parent."""

    fence: Fence
    lease_s: float  # vt - the database's clock, when the row was read
    enqueued_us: int
    visible_us: int  # vt before this claim: since when the message could have been claimed
    headers: bytes | None  # JSON text; None: SQL NULL
    accounts: str | None  # headers->'x-supervisor' where headers is an object, as JSON text
    body: bytes | None  # JSON text; None: SQL NULL, or not loaded (see body_loaded)
    body_loaded: bool
    body_bytes: int  # length of the text; an upper guess where it was not loaded


class AckMode(StrEnum):
    DELETE = "delete"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class Ack:
    """Delete or archive. Needs the fence and a visibility timeout in the future."""

    mode: AckMode


@dataclass(frozen=True, slots=True)
class Retry:
    """Make visible again after `delay_ms`, computed by the database. Needs fence and lease.

    `accounts`: the whole new `x-supervisor` entry as JSON text (absolute values), or None to leave headers alone.
    """

    delay_ms: int
    accounts: str | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Move to the dead-letter queue in one transaction. Needs fence and lease.

    `envelope` is the dead letter (docs/handlers.md) as JSON text without `message`, `headers`, `dead_lettered_at` and
    `source.enqueued_at`, which are filled in by SQL from the row.
    """

    queue: str  # the dead-letter queue
    envelope: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give back at once. Needs the fence only: nobody can have claimed the message since. Also notifies."""

    accounts: str | None
    delay_ms: int = 0


Settlement = Ack | Retry | DeadLetter | Release


class SettleItem(NamedTuple):
    claim_id: int
    fence: Fence
    settlement: Settlement


class SettleOutcome(StrEnum):
    """What the database said of one settlement."""

    DONE = "done"
    GONE = "gone"  # the row is not there, or the fence does not match: settled before, or lost
    FAILED = "failed"  # an error; nothing was changed for this message


class SettleFailure(StrEnum):
    """Why a settlement failed, as far as it matters for what comes next."""

    AWAY = "away"  # the database was not reached, or did not answer in time: it may have been carried out
    REFUSED = "refused"  # an error that may pass: a locked row, a missing dead-letter queue, a full disk
    IMPOSSIBLE = "impossible"  # this message cannot be settled like that, however often it is tried


class SettleResult(NamedTuple):
    claim_id: int
    outcome: SettleOutcome
    error: str | None = None
    failure: SettleFailure = SettleFailure.REFUSED  # says nothing unless the outcome is FAILED


class RenewOutcome(StrEnum):
    DONE = "done"
    BUSY = "busy"  # the fence matches, somebody else holds the row's lock: ask again
    LOST = "lost"  # expired, gone, or claimed by another


class RenewResult(NamedTuple):
    claim_id: int
    outcome: RenewOutcome
    lease_s: float  # the new lease, 0 unless DONE


class ReckonOutcome(StrEnum):
    """Fate of a transactional attempt whose commit we did not hear of."""

    DONE = "done"  # the row was free and as before or as claimed: not settled, and is charged now
    OURS = "ours"  # the row is as we would write it: its own retry was committed, or this very charge went unheard
    GONE = "gone"  # the row is gone: the transaction had committed
    MOVED = "moved"  # read_ct moved on: another attempt has committed since
    BUSY = "busy"  # the attempt's own session still holds the row's lock
    TAKEN = "taken"  # somebody else holds the row's lock
    FAILED = "failed"  # the database was not reached, or did not answer: it may have been carried out
    REFUSED = "refused"  # the database answered with an error: nothing was done


@dataclass(frozen=True, slots=True)
class Reckoning:
    """Charge an attempt that was not settled: read_ct + 1, accounts, backoff; or the dead letter."""

    msg_id: int
    read_ct_before: int
    settlement: Retry | DeadLetter
    extra: int = 0  # attempts that were owed already: read_ct becomes read_ct_before + 1 + extra
    read_at_us: int = 0  # of the claim: the handler may have committed it by hand

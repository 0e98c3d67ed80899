"""A PostgreSQL with PGMQ's rows, as far as the core can tell: what `shared/pgmq/statements` answers, at an instant.

Statements are atomic and happen at one moment of virtual time. A crash of the server may take the last commits back;
open transactions vanish with it, or with their owner.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from shared.pgmq.records import (
    Ack,
    ClaimedRow,
    DeadLetter,
    Fence,
    Reckoning,
    ReckonOutcome,
    Release,
    RenewOutcome,
    RenewResult,
    Retry,
    SettleItem,
    Settlement,
    SettleOutcome,
)
from tests.simulation.ledger import Ledger
from tests.simulation.timeline import Timeline

_ENTRY: Final = "x-supervisor"


@dataclass(slots=True, eq=False)
class Row:
    msg_id: int
    vt_us: int
    enqueued_us: int
    headers: Any
    body: bytes | None
    large: bool
    read_ct: int = 0
    last_read_us: int | None = None
    lock: object | None = None
    touched: bool = False  # claimed by a transaction that did not commit, and not changed since


@dataclass(slots=True, eq=False)
class Transaction:
    """An open transaction of a child: its claim exists for nobody else until it commits."""

    row: Row
    read_ct: int
    xid: int
    read_us: int
    touched: bool
    open: bool = True


@dataclass(slots=True, eq=False)
class Queue:
    """One queue and its dead-letter queue."""

    name: str
    timeline: Timeline
    ledger: Ledger
    rows: dict[int, Row] = field(default_factory=dict)
    dead_letters: list[int] = field(default_factory=list)
    dlq_there: bool = True
    transactions: list[Transaction] = field(default_factory=list)
    fates: dict[int, bool] = field(default_factory=dict)
    """What became of transactions, as long as the server has not restarted."""
    journal: list[tuple[float, Callable[[], None]]] | None = None
    """How to take commits back; None: this story has no crash of the server."""
    _us: int = 0
    _ids: int = 0

    # --- time and headers -------------------------------------------------------------------------------------------

    def clock_us(self) -> int:
        """PostgreSQL's clock_timestamp(); never the same twice."""
        self._us = max(self._us + 1, int(self.timeline.now * 1e6))
        return self._us

    def _written(self, row: Row) -> None:
        """Call before a committed change of `row`."""
        row.touched = False
        if self.journal is None:
            return
        before = (row.read_ct, row.vt_us, row.last_read_us, row.headers)

        def undo() -> None:
            row.read_ct, row.vt_us, row.last_read_us, row.headers = before
            self.rows[row.msg_id] = row

        self.journal.append((self.timeline.now, undo))

    def _drop(self, row: Row) -> None:
        self._written(row)
        del self.rows[row.msg_id]

    @staticmethod
    def accounts_of(row: Row) -> str | None:
        entry = row.headers.get(_ENTRY) if isinstance(row.headers, dict) else None
        if not isinstance(entry, dict):
            return None
        return json.dumps({key: value for key, value in entry.items() if key != "headers"})

    @staticmethod
    def _write_accounts(row: Row, accounts: str | None) -> None:
        if accounts is None:
            return
        entry = json.loads(accounts)
        if not isinstance(row.headers, dict):
            row.headers = {_ENTRY: {**entry, "headers": row.headers}}
        else:
            row.headers = {**row.headers, _ENTRY: entry}

    # --- producers and strangers ------------------------------------------------------------------------------------

    def send(self, headers: Any, body: bytes | None, *, large: bool, delay_s: float) -> int:
        self._ids += 1
        now = self.clock_us()
        self.rows[self._ids] = Row(self._ids, now + int(delay_s * 1e6), now, headers, body, large)
        return self._ids

    def lock(self, msg_id: int) -> Callable[[], None] | None:
        """Some session locks a row; the result ends that."""
        row = self.rows.get(msg_id)
        if row is None or row.lock is not None:
            return None
        row.lock = token = object()

        def unlock() -> None:
            if row.lock is token:
                row.lock = None

        return unlock

    def purge(self, msg_ids: list[int]) -> None:
        """What is deleted under everybody's hands, as `pgmq.purge_queue` does."""
        for msg_id in msg_ids:
            row = self.rows.get(msg_id)
            if row is not None and row.lock is None:
                self._drop(row)
                self.ledger.message(self.name, msg_id).purged = True

    def crash(self, lost_s: float) -> None:
        """The server ends: open transactions are gone, and with them the last commits."""
        for transaction in list(self.transactions):
            self.ledger.message(self.name, transaction.row.msg_id).ran_free = True  # its child does not know yet
            self.rollback(transaction)
        self.fates.clear()
        for row in self.rows.values():
            row.lock = None
        if self.journal is None:
            return
        since = self.timeline.now - lost_s
        while self.journal and self.journal[-1][0] >= since:
            self.journal.pop()[1]()
        self.journal.clear()

    # --- regular mode -----------------------------------------------------------------------------------------------

    def _visible(self, now: int) -> list[Row]:
        due = [row for row in self.rows.values() if row.vt_us <= now and row.lock is None]
        due.sort(key=lambda row: (row.vt_us, row.msg_id))
        return due

    def next_visible_s(self) -> float | None:
        now = self.clock_us()
        later = [row.vt_us for row in self.rows.values() if row.vt_us > now]
        return (min(later) - now) / 1e6 if later else None

    def claim(self, limit: int, lease_s: float, budget: int) -> tuple[tuple[ClaimedRow, ...], float | None]:
        claimed = []
        taken = 0
        for row in self._visible(self.clock_us())[:limit]:
            self._written(row)
            visible_us, read_us = row.vt_us, self.clock_us()
            row.vt_us = read_us + int(lease_s * 1e6)
            row.read_ct += 1
            row.last_read_us = read_us
            self.ledger.message(self.name, row.msg_id).claims += 1
            size = 0 if row.body is None else len(row.body)
            taken += 0 if row.large else size
            loaded = row.body is None or (not row.large and taken <= budget)
            claimed.append(
                ClaimedRow(
                    Fence(row.msg_id, row.read_ct, read_us),
                    lease_s,
                    row.enqueued_us,
                    visible_us,
                    None if row.headers is None else json.dumps(row.headers).encode(),
                    self.accounts_of(row),
                    row.body if loaded else None,
                    loaded,
                    size,
                )
            )
        return tuple(claimed), None if claimed else self.next_visible_s()

    def _fenced(self, fence: Fence) -> Row | None:
        row = self.rows.get(fence.msg_id)
        if row is None or row.read_ct != fence.read_ct or row.last_read_us != fence.read_at_us:
            return None
        return row

    def fetch_body(self, fence: Fence) -> tuple[bool, bytes | None]:
        row = self._fenced(fence)
        return (False, None) if row is None else (True, row.body)

    def renew(self, fences: tuple[tuple[Any, Fence], ...], lease_s: float) -> tuple[RenewResult, ...]:
        results = []
        for claim_id, fence in fences:
            row, now = self._fenced(fence), self.clock_us()
            if row is None or row.vt_us <= now:
                results.append(RenewResult(claim_id, RenewOutcome.LOST, 0.0))
            elif row.lock is not None:
                results.append(RenewResult(claim_id, RenewOutcome.BUSY, 0.0))
            else:
                self._written(row)
                row.vt_us = now + int(lease_s * 1e6)
                results.append(RenewResult(claim_id, RenewOutcome.DONE, lease_s))
        return tuple(results)

    def settle(self, owner: str, item: SettleItem) -> SettleOutcome:
        """The guard first, then the act. What still has our fence and was not served, failed."""
        row = self._fenced(item.fence)
        if row is None:
            return SettleOutcome.GONE
        if row.lock is not None:
            return SettleOutcome.FAILED
        settlement = item.settlement
        if not isinstance(settlement, Release) and row.vt_us <= self.clock_us():
            return SettleOutcome.FAILED
        if isinstance(settlement, DeadLetter) and not self.dlq_there:
            return SettleOutcome.FAILED
        undo = self.ledger.settled(self.name, owner, item)
        if self.journal is not None:
            self.journal.append((self.timeline.now, undo))
        self._apply(row, settlement)
        return SettleOutcome.DONE

    def _apply(
        self, row: Row, settlement: Settlement, read_ct: int | None = None, charged_us: int | None = None
    ) -> None:
        match settlement:
            case Ack():
                self._drop(row)
                self.ledger.acked(self.name, row.msg_id)
            case DeadLetter(_, envelope):
                self._drop(row)
                self.dead_letters.append(row.msg_id)
                self.ledger.dead_lettered(self.name, row.msg_id, envelope)
            case Retry(delay_ms, accounts) | Release(accounts, delay_ms):
                self._written(row)
                now = self.clock_us()
                row.vt_us = now + delay_ms * 1000
                row.last_read_us = max(charged_us or now, (row.last_read_us or 0) + 1)
                if read_ct is not None:
                    row.read_ct = read_ct
                self._write_accounts(row, accounts)
                self.ledger.kept(self.name, row.msg_id, row.read_ct, self.accounts_of(row))

    # --- transactional mode -----------------------------------------------------------------------------------------

    def claim_one(self, xid: int) -> Transaction | None:
        due = self._visible(self.clock_us())
        if not due:
            return None
        transaction = Transaction(due[0], due[0].read_ct + 1, xid, self.clock_us(), due[0].touched)
        due[0].lock = transaction
        self.transactions.append(transaction)
        self.ledger.message(self.name, due[0].msg_id).claims += 1
        return transaction

    def rollback(self, transaction: Transaction) -> None:
        if transaction.open:
            transaction.open = False
            transaction.row.lock = None
            transaction.row.touched = True
            self.transactions.remove(transaction)
            self.fates[transaction.xid] = False

    def postpone(self, transaction: Transaction, delay_ms: int) -> None:
        """What was claimed and given up shall wait a moment; unless somebody was quicker."""
        row, now = transaction.row, self.clock_us()
        free = self.rows.get(row.msg_id) is row and row.lock is None and row.vt_us <= now
        if free and row.read_ct == transaction.read_ct - 1:
            self._written(row)
            row.vt_us = now + delay_ms * 1000

    def commit(self, transaction: Transaction, settlement: Settlement, read_ct: int | None) -> None:
        self._commit_claim(transaction)
        self._apply(transaction.row, settlement, read_ct, transaction.read_us + 1)

    def commit_by_hand(self, transaction: Transaction, lease_s: float) -> None:
        """The handler ends what is not its own: the claim stands, and nothing settles it."""
        self._commit_claim(transaction)
        transaction.row.vt_us = transaction.read_us + int(lease_s * 1e6)

    def _commit_claim(self, transaction: Transaction) -> None:
        self.rollback(transaction)
        self.fates[transaction.xid] = True
        self._written(transaction.row)
        transaction.row.read_ct = transaction.read_ct
        transaction.row.last_read_us = transaction.read_us

    def reckon(self, reckoning: Reckoning, xid: int | None) -> ReckonOutcome:
        row = self.rows.get(reckoning.msg_id)
        if row is None:
            return ReckonOutcome.GONE
        after, charged_us = reckoning.read_ct_before + 1 + reckoning.extra, reckoning.read_at_us + 1
        seen = (row.read_ct, row.last_read_us)
        if seen == (after, charged_us):
            return ReckonOutcome.OURS
        by_hand = seen == (reckoning.read_ct_before + 1, reckoning.read_at_us)
        if row.read_ct != reckoning.read_ct_before and not by_hand:
            return ReckonOutcome.MOVED
        if row.lock is not None:
            own = isinstance(row.lock, Transaction) and row.lock.xid == xid
            return ReckonOutcome.BUSY if own else ReckonOutcome.TAKEN
        if isinstance(reckoning.settlement, DeadLetter) and not self.dlq_there:
            return ReckonOutcome.REFUSED
        self._apply(row, reckoning.settlement, after, charged_us)
        return ReckonOutcome.DONE

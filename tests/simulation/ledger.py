"""What really happened to each message, and what must hold whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shared.pgmq.records import Ack, SettleItem

if TYPE_CHECKING:
    from tests.simulation.children import FakeChild
    from tests.simulation.shell import Shell


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


@dataclass(slots=True, eq=False)
class Message:
    """The truth about one message."""

    forged: bool = False  # its headers claim accounts that nobody wrote
    claims: int = 0
    unheard: int = 0  # claims that the database carried out when the supervisor that had sent them was no more
    unheard_by: Shell | None = None  # the last claim was such a one, and whose
    starts: int = 0
    deaths: int = 0  # of children that had it in their hands, whatever was charged for it
    acks: int = 0
    dead: int = 0
    told_succeeded: int = 0
    told_dead: int = 0
    purged: bool = False
    doubtful: bool = False  # somebody had to guess from its row what became of it
    ran_free: bool = False  # some process may run it that no lease binds: its claim was lost, or it cannot be killed
    successes: set[tuple[str, int]] = field(default_factory=set)  # (owner, claim): its handler finished well
    running: list[FakeChild] = field(default_factory=list)
    uncharged_since: float | None = None  # a child died inside its transaction, whose row came back then


_CHARGED_WITHIN_S: Final = 1.0  # before anybody, another supervisor too, runs what a dead child gave back


class Ledger:
    def __init__(self) -> None:
        self.messages: dict[tuple[str, int], Message] = {}
        self.limits: dict[str, tuple[int, int]] = {}  # queue: max_attempts, max_deaths
        self.late_charges: dict[str, int] = {}  # runs that may begin before an earlier one is charged
        self.applied: dict[tuple[str, str, int], int] = {}

    def message(self, queue: str, msg_id: int) -> Message:
        return self.messages[queue, msg_id]

    # --- what children do -------------------------------------------------------------------------------------------

    def started(self, child: FakeChild, queue: str, msg_id: int) -> None:
        """Overlap only after a lost lease is impossible for a healthy clock: a child is killed before its deadline."""
        message = self.message(queue, msg_id)
        message.starts += 1
        for other in message.running:
            if not message.ran_free:
                raise Violation("one owner", f"{queue}/{msg_id} starts in {child} and still runs in {other}")
        message.running.append(child)

    def started_in_transaction(self, queue: str, msg_id: int, now: float) -> None:
        """A death is charged before its message runs again; one that nobody charges in time is no longer waited for."""
        message = self.message(queue, msg_id)
        since = message.uncharged_since
        if since is not None and not message.ran_free and now - since < _CHARGED_WITHIN_S:
            raise Violation("charged before it runs again", f"{queue}/{msg_id} died at {since}, runs again at {now}")

    def ended(self, child: FakeChild, queue: str, msg_id: int, *, died: bool) -> None:
        message = self.message(queue, msg_id)
        if child in message.running:
            message.running.remove(child)
        if died:
            message.deaths += 1

    def claimed(self, queue: str, msg_id: int, by: Shell) -> None:
        message = self.message(queue, msg_id)
        message.unheard += not by.alive
        message.unheard_by = None if by.alive else by

    # --- what the database took -------------------------------------------------------------------------------------

    def settled(self, queue: str, owner: str, item: SettleItem) -> Callable[[], None]:
        key = (queue, owner, item.claim_id)
        if self.applied.get(key):
            raise Violation("one settlement a claim", f"{queue}/{item.fence.msg_id} by {owner}: {item}")
        self.applied[key] = 1

        def undo() -> None:
            self.applied[key] = 0

        if isinstance(item.settlement, Ack):
            self.may_ack(queue, owner, item.claim_id, item.fence.msg_id)
        return undo

    def may_ack(self, queue: str, owner: str, claim_id: int, msg_id: int) -> None:
        if (owner, claim_id) not in self.message(queue, msg_id).successes:
            raise Violation("no ack without a success", f"{queue}/{msg_id} claim {claim_id} of {owner}")

    def acked(self, queue: str, msg_id: int) -> None:
        self.message(queue, msg_id).acks += 1

    def kept(self, queue: str, msg_id: int, read_ct: int, accounts: str | None) -> None:
        message = self.message(queue, msg_id)
        message.uncharged_since = None
        where = f"{queue}/{msg_id} read_ct {read_ct}, {accounts}"
        if read_ct > message.claims:
            raise Violation("no attempt is charged twice", f"{where}, {message.claims} claims")
        if accounts is None or message.forged:
            return
        entry: dict[str, Any] = json.loads(accounts)
        refunds, deaths = entry.get("refunds", 0), entry.get("deaths", 0)
        if not 0 <= refunds <= read_ct:
            raise Violation("refunds are real", where)
        if not 0 <= deaths <= message.deaths:
            raise Violation("a death is charged once", f"{where}, {message.deaths} deaths")

    def dead_lettered(self, queue: str, msg_id: int, envelope: str) -> None:
        message = self.message(queue, msg_id)
        message.dead += 1
        document = json.loads(envelope)
        source, reason = document["source"], document["reason"]
        max_attempts, max_deaths = self.limits[queue]
        if not message.forged:
            if source["deaths"] > message.deaths:
                raise Violation("a death is charged once", f"{queue}/{msg_id} {source}, {message.deaths} deaths")
            if source["deaths"] > max_deaths + self.late_charges[queue]:
                raise Violation("deaths within their limit", f"{queue}/{msg_id} {source}")
        if reason in ("rejected", "failed", "invalid_message", "cancelled"):
            return
        used_up = source["attempt"] >= max_attempts
        died = reason != "attempts_exhausted" and source["deaths"] >= max_deaths
        if not used_up and not died:
            raise Violation("dead letters have a reason", f"{queue}/{msg_id} {reason} {source}")

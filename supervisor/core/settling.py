"""Carrying verdicts out: every verdict is given to the settler once at a time, and again until its lease is over.

Acknowledgements of quick work are gathered for some milliseconds, as a statement costs as much as the rows of sixty
messages (ADR 0024). Everything else is said at once.

A settlement may be repeated after a failure, since it is guarded by the fence and writes absolute values.
A refund outlives its lease: it needs the fence only, as nobody can have claimed the message since. A success that an
outage kept from the database until its lease was over becomes such a refund: it was no failed attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final

from shared.pgmq.records import (
    DeadLetter,
    Fence,
    Release,
    Retry,
    SettleFailure,
    SettleItem,
    SettleOutcome,
    SettleResult,
)
from supervisor.core import commands as c
from supervisor.core import happenings as h
from supervisor.core.accounts import Accounts
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.states import DeliveryState
from supervisor.core.types import DeadLetterReason, QueueName
from supervisor.core.wakeups import Wakeups

_REFUND_OUTLIVES_LEASE_S: Final = 600.0
_UNMOVABLE_MS: Final = 600_000


class Settling:
    """`refund(delivery, reason)` gives the verdict that gives a message back uncharged."""

    def __init__(
        self, ctx: Context, queue: QueueName, wakeups: Wakeups, refund: Callable[[Delivery, str], Verdict]
    ) -> None:
        self._ctx = ctx
        self._queue = queue
        self._wakeups = wakeups
        self._refund = refund
        self._gather_s = ctx.settings.timing.gather_acks_s
        self.unheard: str | None = None  # why the last settlement did not reach the database, if it did not
        self.say_at = inf  # when the gathered ones are to be said
        self._gathered: list[SettleItem] = []
        self._said_at = -inf
        self._open: dict[int, Delivery] = {}  # by claim
        self._again: dict[int, Delivery] = {}  # failed, waiting for `settle_at`
        self._refunds: dict[int, Delivery] = {}  # those of `_open` that are given back

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> bool:
        """Whether something failed and waits to be tried again."""
        return bool(self._again)

    @property
    def owes_refunds(self) -> bool:
        """Whether an outage keeps a refund from the database: a claim of ours would make an attempt of it."""
        return any(
            d.unheard or (not d.settle_tries and d.verdict is not None and d.verdict.reason == "lease_lost")
            for d in self._refunds.values()
        )

    def decide(self, delivery: Delivery, verdict: Verdict, now: float, *, gather: bool = False) -> None:
        """A verdict stands. From here on the claim is not renewed. `gather`: a success may wait for others."""
        delivery.verdict = verdict
        delivery.decided_at = now
        delivery.body = None
        if verdict.settlement is None:
            delivery.move(DeliveryState.ENDED)
            if verdict.kind == "abandon":
                self._ctx.tell(h.MessageAbandoned(self._queue, delivery.msg_id, delivery.attempt))
            return
        delivery.move(DeliveryState.SETTLING)
        self._open[delivery.id] = delivery
        self._gathered.append(SettleItem(delivery.id, delivery.fence, verdict.settlement))
        if gather and verdict.kind == "success" and now < (say_at := self._said_at + self._gather_s):
            self.say_at = say_at
            return
        self._say_gathered(now)
        if verdict.kind == "release":
            self._refunds[delivery.id] = delivery

    def say_gathered(self, now: float) -> None:
        """Nothing waits for company any more."""
        if self._gathered:
            self._say_gathered(now)

    def _say_gathered(self, now: float) -> None:
        items, self._gathered = tuple(self._gathered), []
        self._said_at, self.say_at = now, inf
        self._ctx.do(c.Settle(self._queue, items))

    def carry_over(self, fence: Fence) -> Accounts | None:
        """We claimed again what a refund of ours waits for, as its row was locked: the refund goes along instead."""
        for delivery in self._again.values():
            verdict = delivery.verdict
            same = delivery.msg_id == fence.msg_id and delivery.fence.read_ct == fence.read_ct - 1
            if same and verdict is not None and verdict.kind == "release":
                for held in (self._again, self._open, self._refunds):
                    held.pop(delivery.id, None)
                delivery.move(DeliveryState.ENDED)
                return verdict.accounts
        return None

    def settled(self, results: tuple[SettleResult, ...], now: float) -> None:
        for result in results:
            delivery = self._open.get(result.claim_id)
            if delivery is None:
                continue  # given up meanwhile
            if result.outcome is SettleOutcome.FAILED:
                self._failed(delivery, now, result)
                continue
            self.unheard = None
            del self._open[delivery.id]
            if self._refunds:
                self._refunds.pop(delivery.id, None)
            delivery.move(DeliveryState.ENDED)
            if result.outcome is SettleOutcome.DONE:
                self._done(delivery, now)
            elif delivery.verdict is not None:
                # After a lost reply this may be our own settlement: not a success that we know of, not a loss either.
                self._lapsed(
                    delivery, delivery.verdict, "the row is gone or not ours any more: settled before, or lost"
                )

    def _failed(self, delivery: Delivery, now: float, result: SettleResult) -> None:
        error = result.error or "unknown error"
        self._ctx.tell(h.SettlementFailed(self._queue, delivery.msg_id, error))
        delivery.unheard = result.failure is SettleFailure.AWAY
        self.unheard = error if delivery.unheard else None
        if result.failure is SettleFailure.IMPOSSIBLE:
            self._settle_otherwise(delivery, now, error)
            return
        timing = self._ctx.settings.timing
        delivery.settle_tries += 1
        backoff = timing.settle_backoff_base_s * 2.0 ** min(delivery.settle_tries - 1, 16)
        backoff = min(timing.settle_backoff_max_s, backoff)
        # On a grid, so that what fails together is tried again in few statements.
        grid = backoff / 8
        delivery.settle_at = (now + backoff * (0.5 + self._ctx.uniform() / 2)) // grid * grid
        if delivery.settle_at < self._limit(delivery):
            self._again[delivery.id] = delivery
        elif delivery.unheard and delivery.verdict is not None and delivery.verdict.kind == "success":
            self._lapsed(delivery, delivery.verdict, error)
            self._decide_otherwise(delivery, self._refund(delivery, "lease_lost"), now)
        else:
            self._give_up(delivery, error)

    def _settle_otherwise(self, delivery: Delivery, now: float, error: str) -> None:
        """The same again would fail the same: settle this message as far as it can be.

        Without its accounts it still counts by its deliveries, so that its attempts end. What cannot be moved stays in
        its queue, since nothing else would keep it, and is looked at seldom.
        """
        verdict = delivery.verdict
        match None if verdict is None else verdict.settlement:
            case Retry(accounts=str()) | Release(accounts=str()) as settlement if verdict is not None:
                other = replace(verdict, settlement=replace(settlement, accounts=None))
            case DeadLetter() if verdict is not None:
                self._lapsed(delivery, verdict, f"it cannot be moved and stays in its queue: {error}")
                other = Verdict(Retry(_UNMOVABLE_MS, None), "retry", "unmovable", _UNMOVABLE_MS, error=verdict.error)
            case _:
                self._give_up(delivery, error)  # its lease brings it back
                return
        self._decide_otherwise(delivery, other, now)

    def _decide_otherwise(self, delivery: Delivery, verdict: Verdict, now: float) -> None:
        """Another verdict in place of one that could not be carried out."""
        delivery.verdict = verdict
        delivery.decided_at = now
        delivery.settle_at = None
        delivery.settle_tries = 0
        delivery.unheard = False
        if verdict.kind == "release":
            self._refunds[delivery.id] = delivery
        self._say(delivery, verdict)

    def _say(self, delivery: Delivery, verdict: Verdict) -> None:
        if verdict.settlement is not None:
            self._ctx.do(c.Settle(self._queue, (SettleItem(delivery.id, delivery.fence, verdict.settlement),)))

    def _limit(self, delivery: Delivery) -> float:
        if delivery.verdict is not None and delivery.verdict.kind == "release":
            return delivery.decided_at + _REFUND_OUTLIVES_LEASE_S
        return delivery.lease_deadline or inf

    def _give_up(self, delivery: Delivery, why: str) -> None:
        self._open.pop(delivery.id, None)
        self._again.pop(delivery.id, None)
        self._refunds.pop(delivery.id, None)
        delivery.move(DeliveryState.ENDED)
        if delivery.verdict is not None:
            self._lapsed(delivery, delivery.verdict, why)

    def give_up_all(self, why: str) -> int:
        """At the end of a shutdown: what the database did not take is left to its lease."""
        count = len(self._open)
        self._gathered.clear()
        self.say_at = inf
        for delivery in list(self._open.values()):
            self._give_up(delivery, why)
        return count

    def tick(self, now: float) -> float:
        if now >= self.say_at:
            self._say_gathered(now)
        deadline = self.say_at
        for delivery in list(self._again.values()):
            if delivery.settle_at is not None and now >= delivery.settle_at and delivery.verdict is not None:
                del self._again[delivery.id]
                delivery.settle_at = None
                self._say(delivery, delivery.verdict)
            elif delivery.settle_at is not None:
                deadline = min(deadline, delivery.settle_at)
        return deadline

    def _done(self, delivery: Delivery, now: float) -> None:
        if delivery.verdict is not None:
            if delivery.verdict.kind in ("retry", "release"):
                self._wakeups.expect(now + delivery.verdict.delay_ms / 1000)
            tell_settled(self._ctx, self._queue, delivery, delivery.verdict, now)

    def _lapsed(self, delivery: Delivery, verdict: Verdict, why: str) -> None:
        self._ctx.tell(h.SettlementLapsed(self._queue, delivery.msg_id, verdict.kind, why))


def tell_settled(ctx: Context, queue: QueueName, delivery: Delivery, verdict: Verdict, now: float) -> None:
    """The database confirmed a verdict: say so. Used by both modes."""
    started, finished = delivery.started_at, delivery.finished_at
    handler_s = None if started is None or finished is None else finished - started
    msg_id, attempt = delivery.msg_id, delivery.attempt
    match verdict.kind:
        case "success":
            ctx.tell(h.MessageSucceeded(queue, msg_id, attempt, handler_s or 0.0, now - delivery.decided_at))
        case "retry":
            ctx.tell(
                h.MessageRetried(queue, msg_id, attempt, verdict.reason, verdict.delay_ms, verdict.error, handler_s)
            )
        case "dead_letter":
            reason = verdict.dead_letter_reason or DeadLetterReason.FAILED
            ctx.tell(h.MessageDeadLettered(queue, msg_id, attempt, reason, verdict.error, handler_s))
        case _:
            ctx.tell(h.MessageReleased(queue, msg_id, verdict.reason))

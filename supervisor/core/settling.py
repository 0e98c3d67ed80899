"""Carrying verdicts out: every verdict is given to the settler once at a time, and again until its lease is over.

A settlement may be repeated after a failure, since it is guarded by the fence and writes absolute values (design 3).
A refund outlives its lease: it needs the fence only, as nobody can have claimed the message since.
"""

from __future__ import annotations

from math import inf
from typing import Final

from shared.pgmq.records import SettleFailure, SettleItem, SettleOutcome, SettleResult
from supervisor.core import commands as c
from supervisor.core import happenings as h
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.states import DeliveryState
from supervisor.core.types import ClaimId, DeadLetterReason, QueueName
from supervisor.core.wakeups import Wakeups

_REFUND_OUTLIVES_LEASE_S: Final = 600.0


class Settling:
    def __init__(self, ctx: Context, queue: QueueName, wakeups: Wakeups) -> None:
        self._ctx = ctx
        self._queue = queue
        self._wakeups = wakeups
        self._open: dict[ClaimId, Delivery] = {}
        self._again: dict[ClaimId, Delivery] = {}  # failed, waiting for `settle_at`

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> bool:
        """Whether something failed and waits to be tried again."""
        return bool(self._again)

    def decide(self, delivery: Delivery, verdict: Verdict, now: float) -> None:
        """A verdict stands. From here on the claim is not renewed."""
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
        self._ctx.do(c.Settle(self._queue, (SettleItem(delivery.id, delivery.fence, verdict.settlement),)))

    def settled(self, results: tuple[SettleResult, ...], now: float) -> None:
        for result in results:
            delivery = self._open.get(ClaimId(result.claim_id))
            if delivery is None:
                continue  # given up meanwhile
            if result.outcome is SettleOutcome.FAILED:
                self._failed(delivery, now, result)
                continue
            del self._open[delivery.id]
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
        if result.failure is SettleFailure.IMPOSSIBLE:
            self._give_up(delivery, error)  # the same again would fail the same; its lease brings it back
            return
        timing = self._ctx.settings.timing
        delivery.settle_tries += 1
        backoff = timing.settle_backoff_base_s * 2.0 ** min(delivery.settle_tries - 1, 16)
        delivery.settle_at = now + min(timing.settle_backoff_max_s, backoff) * (0.5 + self._ctx.uniform() / 2)
        if delivery.settle_at >= self._limit(delivery):
            self._give_up(delivery, error)
        else:
            self._again[delivery.id] = delivery

    def _limit(self, delivery: Delivery) -> float:
        if delivery.verdict is not None and delivery.verdict.kind == "release":
            return delivery.decided_at + _REFUND_OUTLIVES_LEASE_S
        return delivery.lease_deadline or inf

    def _give_up(self, delivery: Delivery, why: str) -> None:
        self._open.pop(delivery.id, None)
        self._again.pop(delivery.id, None)
        delivery.move(DeliveryState.ENDED)
        if delivery.verdict is not None:
            self._lapsed(delivery, delivery.verdict, why)

    def give_up_all(self, why: str) -> int:
        """At the end of a shutdown: what the database did not take is left to its lease."""
        count = len(self._open)
        for delivery in list(self._open.values()):
            self._give_up(delivery, why)
        return count

    def tick(self, now: float) -> float:
        deadline = inf
        for delivery in list(self._again.values()):
            if delivery.settle_at is not None and now >= delivery.settle_at and delivery.verdict is not None:
                del self._again[delivery.id]
                delivery.settle_at = None
                settlement = delivery.verdict.settlement
                if settlement is not None:
                    self._ctx.do(c.Settle(self._queue, (SettleItem(delivery.id, delivery.fence, settlement),)))
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

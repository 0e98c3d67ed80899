"""Transactional mode: attempts that ended without a commit that anybody heard of. *The row is the proof*.

    begin ──▶ asked ──┬── done, ours ──▶ charged
               ▲      ├── gone ────────▶ committed, or settled by somebody else
               │      ├── moved ───────▶ owed: carried over to the next attempt of ours that claims the message
               └──────┴── busy, taken, failed, refused

A rollback undoes the claim and its read_ct, so an attempt without a commit would come back at once, uncharged, for
ever. Each is settled afterwards by one guarded statement. Every charge has one holder: a reckoning that goes on, what
is owed, or the attempt that took it over (its `extra`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, assert_never

from shared.pgmq.records import DeadLetter, Reckoning, ReckonOutcome, Retry
from supervisor.core import commands as c
from supervisor.core import happenings as h
from supervisor.core.context import Context
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.policy import Judge
from supervisor.core.states import DeliveryState
from supervisor.core.types import ClaimId, QueueName

_MAX_OWED: Final = 10_000
_MAX_TOLD: Final = 100  # of what is owed, with a permit
_BUSY_WAIT_S: Final = 2.0  # a killed child's session may hold the row so long before its server notices
_BUSY_AGAIN_S: Final = 0.05
_TAKEN_WAIT_S: Final = 1.0  # another supervisor lets go of what it sees to be ours, unless it works on it
_OWED_AGAIN_S: Final = 0.5  # less than what others wait for a charge before they go on

Settled = Callable[[Delivery, Verdict, float], None]


@dataclass(frozen=True, slots=True)
class Owed:
    """Charges that found their row moved on."""

    attempts: int
    deaths: int

    def __add__(self, other: Owed) -> Owed:
        return Owed(self.attempts + other.attempts, self.deaths + other.deaths)


_NOTHING: Final = Owed(0, 0)


class Reckonings:
    """`settled` is told what the database confirmed. `in_hand` gives the attempts that children work on."""

    def __init__(
        self,
        ctx: Context,
        queue: QueueName,
        judge: Judge,
        *,
        settled: Settled,
        in_hand: Callable[[], Iterator[Delivery]],
    ) -> None:
        self._ctx = ctx
        self._queue = queue
        self._judge = judge
        self._settled = settled
        self._in_hand = in_hand
        self._timing = ctx.settings.timing
        self._open: dict[ClaimId, Delivery] = {}
        self._owed: OrderedDict[int, Owed] = OrderedDict()  # by msg_id

    # --- what others ask --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """All that is not charged yet."""
        return len(self._open) + len(self._owed)

    def __iter__(self) -> Iterator[Delivery]:
        """Give the attempts that are being reckoned."""
        return iter(self._open.values())

    @property
    def urgent(self) -> int:
        """Attempts whose rows are free, or will be in a moment: they must be charged before anyone may claim them."""
        return sum(1 for delivery in self._open.values() if not delivery.lingers)

    def has(self, msg_id: int) -> bool:
        """Whether an attempt at this message is being reckoned."""
        return any(delivery.msg_id == msg_id for delivery in self._open.values())

    def hurry(self, msg_id: int) -> None:
        """Its row was given back just now: ask at once."""
        for delivery in self._open.values():
            if delivery.msg_id == msg_id and delivery.settle_at is not None:
                self._ask(delivery)

    def owed(self) -> tuple[tuple[int, int, int], ...]:
        """What a child must know to count right (msg_id, attempts, deaths): also what it would take over."""
        owed = dict(list(self._owed.items())[-_MAX_TOLD:])
        for delivery in self._open.values():
            if delivery.lingers:
                owed[delivery.msg_id] = owed.get(delivery.msg_id, _NOTHING) + self._charge_of(delivery)
        return tuple((msg_id, charge.attempts, charge.deaths) for msg_id, charge in owed.items())

    # --- asking -----------------------------------------------------------------------------------------------------

    def begin(self, delivery: Delivery, charge: Verdict) -> None:
        """An attempt has ended without a commit that we heard of. `charge` is what a rollback leads to."""
        delivery.move(DeliveryState.RECKONING)
        delivery.verdict = charge
        self._open[delivery.id] = delivery
        self._ask(delivery)

    def _ask(self, delivery: Delivery) -> None:
        delivery.settle_at = None
        settlement = delivery.verdict.settlement if delivery.verdict is not None else None
        if not isinstance(settlement, Retry | DeadLetter):
            raise TypeError(f"a reckoning needs a retry or a dead letter, not {settlement!r}")
        fence = delivery.fence
        question = Reckoning(fence.msg_id, fence.read_ct - 1, settlement, delivery.extra, fence.read_at_us)
        self._ctx.do(c.Reckon(self._queue, delivery.id, question, delivery.tx))

    def tick(self, now: float) -> float:
        """Ask again what is due. Returns the next deadline."""
        deadline = inf
        for delivery in list(self._open.values()):
            if delivery.settle_at is None:
                continue
            if now >= delivery.settle_at:
                self._ask(delivery)
            else:
                deadline = min(deadline, delivery.settle_at)
        return deadline

    # --- answers ----------------------------------------------------------------------------------------------------

    def answered(
        self, claim_id: ClaimId, outcome: ReckonOutcome, now: float, *, committed: bool | None, error: str | None
    ) -> None:
        """`committed`: what the server says of the attempt's own transaction; None: not known, or not asked."""
        delivery = self._open.get(claim_id)
        if delivery is None or delivery.verdict is None:
            return
        match outcome:
            case ReckonOutcome.DONE:
                self._end(delivery)
                self._name(delivery, "rolled_back")
                self._settled(delivery, delivery.verdict, now)
            case ReckonOutcome.OURS:
                self._end(delivery)
                self._is_as_wanted(delivery, delivery.verdict, committed, now)
            case ReckonOutcome.GONE:
                self._end(delivery)
                self._is_gone(delivery, committed, now)
            case ReckonOutcome.MOVED:
                self._end(delivery)
                self._has_moved(delivery, committed, now)
            case ReckonOutcome.BUSY | ReckonOutcome.TAKEN:
                self._is_locked(delivery, now, ours=outcome is ReckonOutcome.BUSY)
            case ReckonOutcome.FAILED:
                delivery.unheard = True
                self._again_later(delivery, now)
            case ReckonOutcome.REFUSED:
                self._is_refused(delivery, delivery.verdict, error or "", now)
            case _:
                assert_never(outcome)

    def _name(self, delivery: Delivery, outcome: str) -> None:
        if delivery.in_doubt:
            self._ctx.tell(h.CommitInDoubt(self._queue, delivery.msg_id, outcome))

    def _is_as_wanted(self, delivery: Delivery, verdict: Verdict, committed: bool | None, now: float) -> None:
        """Our own retry was committed, or this charge was made before and nobody heard of it."""
        granted = delivery.granted
        could_be = granted is not None and granted.kind == "retry"
        if could_be and committed is not False and not (committed is None and delivery.unheard):
            self._name(delivery, "committed")
        else:
            self._name(delivery, "rolled_back")
        self._settled(delivery, verdict, now)

    def _is_gone(self, delivery: Delivery, committed: bool | None, now: float) -> None:
        granted = delivery.granted
        if delivery.in_doubt and granted is not None and granted.kind != "retry" and committed is not False:
            self._name(delivery, "committed")
            self._settled(delivery, granted, now)
        else:
            self._lapse(delivery, "its row is gone: settled by somebody else, or charged unheard")

    def _has_moved(self, delivery: Delivery, committed: bool | None, now: float) -> None:
        granted = delivery.granted
        if delivery.in_doubt and granted is not None:
            # The server's word goes before the look of the row. Without it: an ack would have taken the row away, and
            # a retry may have moved on since.
            if committed or (granted.kind == "retry" and committed is None):
                self._name(delivery, "committed")
                self._settled(delivery, granted, now)
                return
            self._name(delivery, "rolled_back")
        if delivery.unheard:
            # After a lost answer this may be our own charge, moved on since, and none is made twice.
            self._lapse(delivery, "its row has moved on: settled by somebody else, or charged unheard")
        else:
            self._owe(delivery, counted=bool(committed))

    def _is_locked(self, delivery: Delivery, now: float, *, ours: bool) -> None:
        """By the session of the child that died, or by somebody's next attempt: then it is no longer in the way."""
        ours = ours or any(attempt.msg_id == delivery.msg_id for attempt in self._in_hand())
        if delivery.reckoned_busy_since is None:
            delivery.reckoned_busy_since = now
        waited_s = now - delivery.reckoned_busy_since
        if not delivery.lingers and (not ours or waited_s >= _BUSY_WAIT_S):
            self._linger(delivery)
        patient = waited_s >= (_BUSY_WAIT_S if ours else _TAKEN_WAIT_S)
        delivery.settle_at = now + (_OWED_AGAIN_S if patient else _BUSY_AGAIN_S)
        for attempt in self._in_hand():
            # One that is held or refused gives the row back in a moment.
            if attempt.held_until is None and attempt.verdict is None and self._absorb(attempt, delivery):
                return

    def _linger(self, delivery: Delivery) -> None:
        delivery.lingers = True
        self._ctx.tell(h.ChargeOwed(self._queue, delivery.msg_id))

    def _again_later(self, delivery: Delivery, now: float) -> None:
        delivery.reckon_tries += 1
        backoff = self._timing.settle_backoff_base_s * 2.0 ** min(delivery.reckon_tries - 1, 16)
        delivery.settle_at = now + min(self._timing.settle_backoff_max_s, backoff)

    def _is_refused(self, delivery: Delivery, verdict: Verdict, error: str, now: float) -> None:
        """The database answered with an error. What is not as important as the charge is left out, step by step."""
        self._ctx.tell(h.SettlementFailed(self._queue, delivery.msg_id, error))
        settlement = verdict.settlement
        if isinstance(settlement, DeadLetter):
            # Failure model: the source stays. It comes back after a pause, and is dead-lettered then.
            delivery.verdict = self._judge.undeliverable(delivery, verdict)
        elif isinstance(settlement, Retry) and settlement.accounts is not None:
            delivery.verdict = replace(verdict, settlement=replace(settlement, accounts=None))
        else:
            self._again_later(delivery, now)
            if not delivery.lingers:
                self._linger(delivery)
            return
        self._ask(delivery)

    def _end(self, delivery: Delivery) -> None:
        del self._open[delivery.id]
        delivery.move(DeliveryState.ENDED)

    def _lapse(self, delivery: Delivery, why: str) -> None:
        kind = "none" if delivery.verdict is None else delivery.verdict.kind
        self._ctx.tell(h.SettlementLapsed(self._queue, delivery.msg_id, kind, why))

    # --- owing ------------------------------------------------------------------------------------------------------

    def take_over(self, attempt: Delivery) -> None:
        """A child of ours claimed a message: this attempt carries what was owed for it, and what is being asked."""
        owed = self._owed.pop(attempt.msg_id, None)
        if owed is not None:
            self._add(attempt, owed)
        for debtor in list(self._open.values()):
            if debtor.settle_at is not None:  # with its question on the way nobody knows what it charges
                self._absorb(attempt, debtor)

    def forget(self, msg_id: int) -> None:
        """Its message is settled for good."""
        self._owed.pop(msg_id, None)

    def _charge_of(self, delivery: Delivery) -> Owed:
        """What an attempt in reckoning adds to its row, with what it took over."""
        deaths = 0
        if delivery.verdict is not None and delivery.verdict.accounts is not None:
            deaths = max(0, delivery.verdict.accounts.deaths - delivery.stored.deaths)
        uncharged = delivery.verdict is None or delivery.verdict.kind == "release"
        return Owed(delivery.extra + (0 if uncharged else 1), deaths)

    def _absorb(self, attempt: Delivery, debtor: Delivery) -> bool:
        """The row was claimed with the read_ct that the debtor's claim had: that one was rolled back, uncharged."""
        if attempt.fence[:2] != debtor.fence[:2]:
            return False
        self._add(attempt, self._charge_of(debtor))
        self._end(debtor)
        return True

    @staticmethod
    def _add(attempt: Delivery, owed: Owed) -> None:
        attempt.extra += owed.attempts
        attempt.accounts = replace(attempt.accounts, deaths=attempt.accounts.deaths + owed.deaths)
        attempt.attempt = attempt.accounts.attempt(attempt.fence.read_ct + attempt.extra)

    def _owe(self, delivery: Delivery, *, counted: bool) -> None:
        """`counted`: its claim was committed by the handler's own hand, and is in the row's read_ct."""
        charge = self._charge_of(delivery)
        attempts = max(0, charge.attempts - counted)
        if not attempts and not charge.deaths:
            return
        before = self._owed.pop(delivery.msg_id, _NOTHING)
        self._owed[delivery.msg_id] = before + Owed(attempts, charge.deaths)
        while len(self._owed) > _MAX_OWED:
            self._owed.popitem(last=False)
        self._ctx.tell(h.ChargeOwed(self._queue, delivery.msg_id))

    # --- the end ----------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """The supervisor stops; what is not charged by now never will be."""
        for delivery in list(self._open.values()):
            self._end(delivery)
            self._lapse(delivery, "the supervisor stops; not charged")

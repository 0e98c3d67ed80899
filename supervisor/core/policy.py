"""Policy: from what happened to a message to its verdict. Pure functions; one page for results, one for deaths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, assert_never

from shared.pgmq.records import Ack, AckMode, DeadLetter, Release, Retry
from supervisor.core.accounts import MAX_DEADLOCKS_IN_A_ROW, Accounts
from supervisor.core.delivery import Delivery, Verdict
from supervisor.core.envelope import build_envelope
from supervisor.core.settings import CoreSettings, QueueSettings, RetryPolicy
from supervisor.core.types import (
    CHARGED_CAUSES,
    DeadLetterReason,
    DeathCause,
    DeathFacts,
    ErrorInfo,
    Outcome,
    OutcomeKind,
    StopReason,
)

_MAX_DOUBLINGS: Final = 64
_UNDELIVERABLE_MS: Final = 1_000
_UNCHARGED_SQLSTATES: Final = frozenset({"40001", "40P01"})  # serialization_failure, deadlock_detected


def retry_delay_ms(policy: RetryPolicy, attempt: int, uniform: Callable[[], float]) -> int:
    """Delay in milliseconds after `attempt` (from 1) failed: exponential, capped, times U[0.5, 1] with jitter."""
    delay_s = policy.base_s
    for _ in range(min(attempt - 1, _MAX_DOUBLINGS)):  # not a power, which may overflow
        delay_s *= policy.factor
        if delay_s >= policy.max_s:
            break
    delay_s = min(policy.max_s, delay_s)
    if policy.jitter:
        delay_s *= 0.5 + uniform() / 2
    return int(delay_s * 1000)


class Judge:
    """Verdicts for one queue."""

    def __init__(self, settings: CoreSettings, queue: QueueSettings, uniform: Callable[[], float]) -> None:
        self._settings = settings
        self._queue = queue
        self._uniform = uniform
        # Made once: nearly every message ends so.
        self._successes = {mode: Verdict(Ack(mode), "success") for mode in AckMode}

    def of_outcome(self, delivery: Delivery, outcome: Outcome) -> Verdict:
        """The handler ended and its child says how (docs/handlers.md)."""
        kind = outcome.kind
        if kind is OutcomeKind.SUCCESS:
            return self._successes[outcome.ack or self._queue.on_success]
        if kind is OutcomeKind.REJECT:
            error = outcome.error or ErrorInfo("Rejected", outcome.reason or "", "")
            return self._dead_letter(delivery, DeadLetterReason.REJECTED, error)
        if delivery.stop_reason is StopReason.CANCELLED:
            # Whatever a cancelled handler raises on its way out, it was asked to go: it must not run again.
            return self._dead_letter(delivery, DeadLetterReason.CANCELLED, outcome.error)
        match kind:
            case OutcomeKind.RETRY:
                return self._failed_attempt(delivery, outcome.error, "requested", outcome.delay_ms)
            case OutcomeKind.ABANDON:
                return Verdict(None, "abandon")
            case OutcomeKind.INVALID_MESSAGE:
                return self._dead_letter(delivery, DeadLetterReason.INVALID_MESSAGE, outcome.error)
            case OutcomeKind.STOPPED:
                return self._stopped(delivery, outcome)
            case OutcomeKind.ERROR if outcome.permanent:
                return self._dead_letter(delivery, DeadLetterReason.FAILED, outcome.error)
            case OutcomeKind.ERROR if outcome.sqlstate in _UNCHARGED_SQLSTATES and delivery.tx is not None:
                return self.conflict(delivery, outcome.error)
            case OutcomeKind.ERROR:
                return self._failed_attempt(delivery, outcome.error, "error", None)
            case _:
                assert_never(kind)

    def _stopped(self, delivery: Delivery, outcome: Outcome) -> Verdict:
        match delivery.stop_reason:
            case None:  # a forged or stale Stopped: nobody asked
                return self._failed_attempt(delivery, outcome.error, "error", None)
            case StopReason.SOFT_TIMEOUT:
                return self._failed_attempt(delivery, outcome.error, "soft_timeout", None)
            case reason:
                return self.refund(delivery, str(reason))

    def of_death(self, delivery: Delivery, cause: DeathCause, facts: DeathFacts) -> Verdict:
        """The child ended with this message in its hands, after the handler was called (docs/failure-model.md)."""
        if cause is DeathCause.CANCELLED:
            return self._dead_letter(delivery, DeadLetterReason.CANCELLED, None, (cause, facts))
        if cause not in CHARGED_CAUSES:
            return self.refund(delivery, str(cause))
        accounts = delivery.accounts.charged_death()
        if delivery.stop_reason is StopReason.CANCELLED:
            return self._dead_letter(delivery, DeadLetterReason.CANCELLED, None, (cause, facts), accounts)
        if accounts.deaths >= self._queue.max_deaths or delivery.attempt >= self._queue.max_attempts:
            return self._dead_letter(delivery, _reason_of(cause), None, (cause, facts), accounts)
        delay_ms = retry_delay_ms(self._queue.retry, delivery.attempt, self._uniform)
        return self._retry(delivery, delay_ms, str(cause), None, accounts, charged=True)

    def refund(self, delivery: Delivery, reason: str, delay_ms: int = 0) -> Verdict:
        """Give back unrun or uncharged: this delivery does not count as an attempt."""
        accounts = delivery.accounts.refunded()
        text = accounts.to_json(self._queue.name, delivery.msg_id)
        return Verdict(Release(text, delay_ms), "release", reason, delay_ms, accounts=accounts)

    def conflict(self, delivery: Delivery, error: ErrorInfo | None) -> Verdict:
        """Deadlock or serialization failure: backoff without charge, at most so many in a row."""
        accounts = delivery.accounts
        if accounts.deadlocks >= MAX_DEADLOCKS_IN_A_ROW:
            return self._failed_attempt(delivery, error, "error", None)
        accounts = replace(accounts.refunded(), deadlocks=accounts.deadlocks + 1)
        delay_ms = retry_delay_ms(self._queue.retry, accounts.deadlocks, self._uniform)
        return self._retry(delivery, delay_ms, "deadlock", error, accounts)

    def uncommitted(self, delivery: Delivery, error: ErrorInfo | None, sqlstate: str | None) -> Verdict:
        """Transactional: the attempt ended without a commit though its child lives."""
        if delivery.stop_reason is StopReason.CANCELLED:
            return self._dead_letter(delivery, DeadLetterReason.CANCELLED, error)
        if sqlstate in _UNCHARGED_SQLSTATES:
            return self.conflict(delivery, error)
        return self._failed_attempt(delivery, error, "error", None)

    def abandoned(self, delivery: Delivery) -> Verdict:
        """Transactional: rolled back on request; comes back after one visibility timeout, and counts."""
        delay_ms = int(self._queue.visibility_timeout_s * 1000)
        return self._retry(delivery, delay_ms, "abandoned", None, replace(delivery.accounts, deadlocks=0))

    def spent(self, delivery: Delivery, error: ErrorInfo | None) -> Verdict:
        """Transactional: it had all its deaths before this delivery, and could not be dead-lettered then."""
        return self._dead_letter(delivery, DeadLetterReason.DIED, error)

    def undeliverable(self, delivery: Delivery, letter: Verdict) -> Verdict:
        """Transactional: its dead letter is refused. It comes back after a pause, with all that it was charged."""
        accounts = letter.accounts or delivery.accounts
        delay_ms = max(_UNDELIVERABLE_MS, retry_delay_ms(self._queue.retry, delivery.attempt, self._uniform))
        verdict = self._retry(delivery, delay_ms, "dead_letter_failed", letter.error, accounts, charged=letter.charged)
        return replace(verdict, settlement=Retry(delay_ms, accounts.to_json(self._queue.name, delivery.msg_id)))

    def _failed_attempt(
        self, delivery: Delivery, error: ErrorInfo | None, reason: str, delay_ms: int | None
    ) -> Verdict:
        if delivery.attempt >= self._queue.max_attempts:
            return self._dead_letter(delivery, DeadLetterReason.ATTEMPTS_EXHAUSTED, error)
        if delay_ms is None:
            delay_ms = retry_delay_ms(self._queue.retry, delivery.attempt, self._uniform)
        accounts = replace(delivery.accounts, deadlocks=0)
        return self._retry(delivery, delay_ms, reason, error, accounts)

    def _retry(
        self,
        delivery: Delivery,
        delay_ms: int,
        reason: str,
        error: ErrorInfo | None,
        accounts: Accounts,
        *,
        charged: bool = False,
    ) -> Verdict:
        # Headers stay as they are unless an account changed: most retries rewrite no headers.
        same = accounts == delivery.stored and not accounts.corrected
        text = None if same else accounts.to_json(self._queue.name, delivery.msg_id)
        return Verdict(
            Retry(delay_ms, text), "retry", reason, delay_ms, error=error, charged=charged, accounts=accounts
        )

    def _dead_letter(
        self,
        delivery: Delivery,
        reason: DeadLetterReason,
        error: ErrorInfo | None,
        death: tuple[DeathCause, DeathFacts] | None = None,
        charged: Accounts | None = None,
    ) -> Verdict:
        accounts = charged or delivery.accounts
        envelope = build_envelope(
            self._settings,
            reason=reason,
            queue=self._queue.name,
            msg_id=delivery.msg_id,
            attempt=delivery.attempt,
            deliveries=delivery.fence.read_ct,
            deaths=accounts.deaths,
            error=error,
            death=death,
        )
        return Verdict(
            DeadLetter(self._queue.dead_letter_queue, envelope),
            "dead_letter",
            str(reason),
            error=error,
            dead_letter_reason=reason,
            charged=charged is not None,
            accounts=accounts,
        )


def _reason_of(cause: DeathCause) -> DeadLetterReason:
    match cause:
        case DeathCause.HARD_TIMEOUT:
            return DeadLetterReason.HARD_TIMEOUT
        case DeathCause.MEMORY_LIMIT | DeathCause.OOM:
            return DeadLetterReason.MEMORY_LIMIT
        case _:
            return DeadLetterReason.DIED

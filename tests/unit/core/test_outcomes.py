"""What a handler does and what comes of it: the table of docs/handlers.md, row by row, in regular mode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.pgmq.records import Ack, AckMode, DeadLetter, Retry, SettleOutcome
from supervisor.core import commands as c
from supervisor.core import happenings as h
from supervisor.core.types import DeadLetterReason, ErrorInfo, Outcome, OutcomeKind
from tests.unit.core.stage import ERROR, FAILURE, STOPPED, Stage, queue, row

RETRY = Outcome(OutcomeKind.RETRY, delay_ms=7_000)


def after(outcome: Outcome, *, read_ct: int = 1, **settings: Any) -> tuple[Stage, Any]:
    """One message is run, ends so, and the database confirms what follows; gives the settlement."""
    stage = Stage(queue(**settings)).start()
    dispatch = stage.run(row(1, read_ct))
    stage.finish(dispatch, outcome)
    items = stage.settlements()
    stage.settle()
    return stage, items[0].settlement if items else None


def dead_letter(outcome: Outcome, **settings: Any) -> dict[str, Any]:
    """The envelope that the outcome leads to."""
    stage, settlement = after(outcome, **settings)
    assert isinstance(settlement, DeadLetter)
    assert settlement.queue == "q_dlq"
    assert len(stage.told(h.MessageDeadLettered)) == 1
    document: dict[str, Any] = json.loads(settlement.envelope)
    return document


def test_a_return_is_a_success_and_deletes() -> None:
    """The default of on_success."""
    stage, settlement = after(Outcome(OutcomeKind.SUCCESS))
    assert settlement == Ack(AckMode.DELETE)
    assert [happening.msg_id for happening in stage.told(h.MessageSucceeded)] == [1]


def test_a_success_is_archived_where_the_queue_says_so() -> None:
    """on_success = "archive"."""
    assert after(Outcome(OutcomeKind.SUCCESS), on_success=AckMode.ARCHIVE)[1] == Ack(AckMode.ARCHIVE)


@pytest.mark.parametrize("mode", list(AckMode))
def test_the_handler_overrides_what_a_success_does(mode: AckMode) -> None:
    """`message.archive()` and `message.delete()`."""
    other = AckMode.DELETE if mode is AckMode.ARCHIVE else AckMode.ARCHIVE
    assert after(Outcome(OutcomeKind.SUCCESS, ack=mode), on_success=other)[1] == Ack(mode)


def test_no_success_is_told_before_the_database_confirmed_it() -> None:
    """A settlement may still find its row gone."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)))
    assert not stage.told(h.MessageSucceeded)
    stage.settle(SettleOutcome.GONE)
    assert not stage.told(h.MessageSucceeded)
    assert len(stage.told(h.SettlementLapsed)) == 1


def test_a_retry_comes_back_after_exactly_what_was_asked_for() -> None:
    """No policy, no jitter; the headers stay as they are."""
    stage, settlement = after(RETRY)
    assert settlement == Retry(7_000, None)
    assert [happening.reason for happening in stage.told(h.MessageRetried)] == ["requested"]


def test_a_retry_counts_as_a_failed_attempt() -> None:
    """Dead-lettered at max_attempts."""
    assert isinstance(after(RETRY, read_ct=4, max_attempts=5)[1], Retry)
    assert dead_letter(RETRY, read_ct=5, max_attempts=5)["reason"] == "attempts_exhausted"


def test_a_retry_without_a_delay_follows_the_policy() -> None:
    """`message.retry()`."""
    assert after(Outcome(OutcomeKind.RETRY), read_ct=3)[1] == Retry(4_000, None)


def test_a_rejection_is_dead_lettered_with_its_reason() -> None:
    """`message.dead_letter(reason)`."""
    document = dead_letter(Outcome(OutcomeKind.REJECT, reason="no such customer"))
    assert document["reason"] == "rejected"
    assert document["error"] == {"type": "Rejected", "message": "no such customer", "traceback": ""}


def test_an_abandoned_message_is_left_to_its_lease() -> None:
    """No settlement; it comes back after one visibility timeout, and read_ct counts it."""
    stage = Stage().start()
    stage.finish(stage.run(row(1)), Outcome(OutcomeKind.ABANDON))
    assert not stage.settlements()
    assert [happening.msg_id for happening in stage.told(h.MessageAbandoned)] == [1]
    assert stage.look().in_flight == 0


def test_an_error_is_retried_with_growing_delays() -> None:
    """Base * factor^(n-1)."""
    assert [after(FAILURE, read_ct=n)[1] for n in (1, 2, 3)] == [Retry(ms, None) for ms in (1_000, 2_000, 4_000)]


def test_an_error_at_the_last_attempt_is_dead_lettered() -> None:
    """The document says what, where and how often."""
    document = dead_letter(FAILURE, read_ct=5)
    assert document == {
        "version": 1,
        "reason": "attempts_exhausted",
        "source": {"queue": "q", "msg_id": 1, "attempt": 5, "deliveries": 5, "deaths": 0},
        "error": {"type": "ValueError", "message": "no", "traceback": "Traceback ..."},
        "death": None,
        "worker": {"host": "host", "supervisor": "me", "version": "1"},
    }


def test_a_permanent_error_is_dead_lettered_at_once() -> None:
    """A true attribute `permanent`, or an impossible delay, which the child reports so."""
    assert dead_letter(Outcome(OutcomeKind.ERROR, error=ERROR, permanent=True))["reason"] == "failed"


def test_a_body_that_cannot_be_read_is_dead_lettered() -> None:
    """SQL NULL, or undecodable when `.body` is read."""
    assert dead_letter(Outcome(OutcomeKind.INVALID_MESSAGE, error=ERROR))["reason"] == "invalid_message"


def test_a_stop_that_nobody_asked_for_is_a_failed_attempt() -> None:
    """A handler may raise `Stopped` by itself."""
    assert after(STOPPED)[1] == Retry(1_000, None)


def test_a_conflict_of_the_handlers_own_database_is_an_ordinary_failure() -> None:
    """In regular mode a SQLSTATE is the handler's affair: only our own transactions are uncharged."""
    assert after(Outcome(OutcomeKind.ERROR, error=ERROR, sqlstate="40001"))[1] == Retry(1_000, None)


def test_hostile_texts_cannot_fail_the_move() -> None:
    """NUL and lone surrogates are cleaned, and long texts cut, before they go into SQL."""
    error = ErrorInfo("E\x00", "\ud800" + "x" * 200_000, "t\x00")
    document = dead_letter(Outcome(OutcomeKind.ERROR, error=error, permanent=True))
    text = json.dumps(document["error"], ensure_ascii=False)
    assert "\x00" not in text
    text.encode()
    assert len(document["error"]["message"].encode()) <= 64 * 1024


def test_a_message_that_comes_again_and_again_without_a_verdict_ends() -> None:
    """It ended its supervisor each time: read_ct alone counts, and no child gets it once more."""
    stage = Stage(queue(max_attempts=3)).start()
    stage.give(row(1, read_ct=4))
    assert not stage.all(c.Dispatch)
    (item,) = stage.settlements()
    assert isinstance(item.settlement, DeadLetter)
    assert json.loads(item.settlement.envelope)["reason"] == "attempts_exhausted"
    stage.settle()
    assert stage.told(h.MessageDeadLettered)[0].reason is DeadLetterReason.ATTEMPTS_EXHAUSTED


def test_a_result_without_its_start_counts() -> None:
    """STARTED and the result may come in one read; the handler was called all the same."""
    stage = Stage().start()
    dispatch = stage.give(row(1)).only(c.Dispatch)
    stage.finish(dispatch)
    assert len(stage.told(h.MessageStartedRunning)) == 1
    assert len(stage.settlements()) == 1


def test_a_result_for_another_message_says_nothing() -> None:
    """A late or forged frame settles nothing."""
    stage = Stage().start()
    dispatch = stage.run(row(1))
    stage.tell()
    stage.finish(c.Dispatch(dispatch.child, dispatch.claim_id, 1, 1, 1, 0, None, None, None, 0.0))
    stage.finish(dispatch)
    assert not stage.settlements()

"""Commands of the core as frames for a child."""

from __future__ import annotations

from typing import Any, assert_never

from shared.pgmq.records import Ack, DeadLetter, Release, Retry
from shared.wire.frames import Kind, ProtocolError, encode, encode_dispatch
from supervisor.core.commands import AnswerClaim, AnswerCommit, Dispatch, GrantPermit, SendStop


def dispatch_frame(command: Dispatch) -> bytes:
    """DISPATCH. Raises `ProtocolError` over the body limit."""
    limit = command.hard_timeout_s
    return encode_dispatch(
        (
            command.claim_id,
            command.msg_id,
            command.attempt,
            command.deliveries,
            command.enqueued_us,
            -1 if limit is None else int(limit * 1000),
            command.headers or b"",
            command.body,
        )
    )


def stop_frame(command: SendStop) -> bytes:
    """STOP for the message in hand."""
    return encode(Kind.STOP, command.claim_id, {"reason": command.reason.value})


def exit_frame() -> bytes:
    """EXIT."""
    return encode(Kind.EXIT, 0)


def permit_frame(command: GrantPermit) -> bytes:
    """PERMIT."""
    limit = command.time_limit_s
    meta: dict[str, Any] = {
        "time_limit_ms": None if limit is None else int(limit * 1000),
        "owed": [list(pair) for pair in command.owed],
    }
    return encode(Kind.PERMIT, command.claim_id, meta)


def claim_frame(command: AnswerClaim) -> bytes:
    """VERDICT on a claim."""
    if command.postpone_ms is not None:
        return encode(Kind.VERDICT, command.claim_id, {"verdict": "postpone", "delay_ms": command.postpone_ms})
    return encode(Kind.VERDICT, command.claim_id, {"verdict": "go" if command.go else "refuse"})


def verdict_frame(command: AnswerCommit) -> bytes:
    """VERDICT. A verdict that does not fit into a frame becomes a refusal: rolled back, then settled by SQL."""
    try:
        return encode(Kind.VERDICT, command.claim_id, _verdict(command))
    except ProtocolError:
        return encode(Kind.VERDICT, command.claim_id, {"verdict": "refuse"})


def _verdict(command: AnswerCommit) -> dict[str, Any]:
    settlement = command.settlement
    match settlement:
        case None:
            return {"verdict": "refuse"}
        case Ack(mode):
            return {"verdict": "ack", "mode": mode.value, "keep_work": command.keep_work}
        case Retry(delay_ms, accounts) | Release(accounts=accounts, delay_ms=delay_ms):
            return {"verdict": "retry", "delay_ms": delay_ms, "accounts": accounts, "read_ct": command.read_ct}
        case DeadLetter(queue, envelope):
            return {"verdict": "dead_letter", "queue": queue, "envelope": envelope}
        case _ as never:
            assert_never(never)

"""Unit tests of handlers: call one with a message made by hand and learn what its queue would make of it.

No process and no queue take part. A transactional handler works on a real connection: its work is committed when it
succeeds, and rolled back otherwise, as it would be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from crashtests.testing.messages import InvalidMessage, Message, Stopped, Verdict
from crashtests.testing.transactions import AsyncTransaction, Outbox, Transaction

__all__ = ["HandlerOutcome", "run_handler"]


@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """What would become of the message.

    `kind`: success, retry, dead_letter, abandon, error, permanent, invalid_message or stopped. `delay_s` None: by the
    queue's policy. `ack`: what the handler asked for, None: the queue's on_success. `committed`: its SQL is there.
    """

    kind: str
    value: object = None
    delay_s: float | None = None
    reason: str = ""
    ack: str | None = None
    error: BaseException | None = None
    committed: bool = False


def run_handler(handler: Callable[..., Any], message: Message, *, dsn: str | None = None) -> HandlerOutcome:
    """Call it, plain or async. With `dsn` it is transactional and gets `tx`. Raises nothing of the handler's."""
    if asyncio.iscoroutinefunction(handler) or asyncio.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004 - the method itself
        return asyncio.run(_run_async(handler, message, dsn))
    if dsn is None:
        return _outcome(*_call(handler, message), message)
    outbox = Outbox()
    with psycopg.connect(dsn) as connection:
        outcome = _outcome(*_call(handler, message, Transaction(connection, outbox)), message)
        if outcome.kind != "success":
            connection.rollback()
            return outcome
        _refuse_ended(connection)
        for statement, parameters in outbox.statements():
            connection.execute(statement, parameters)
        connection.commit()
    return _committed(outcome)


async def _run_async(handler: Callable[..., Any], message: Message, dsn: str | None) -> HandlerOutcome:
    if dsn is None:
        return _outcome(*await _call_async(handler, message), message)
    outbox = Outbox()
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        outcome = _outcome(*await _call_async(handler, message, AsyncTransaction(connection, outbox)), message)
        if outcome.kind != "success":
            await connection.rollback()
            return outcome
        _refuse_ended(connection)
        for statement, parameters in outbox.statements():
            await connection.execute(statement, parameters)
        await connection.commit()
    return _committed(outcome)


def _call(handler: Callable[..., Any], *arguments: object) -> tuple[object, BaseException | None]:
    try:
        return handler(*arguments), None
    except BaseException as error:  # noqa: BLE001 - the handler boundary: sys.exit is a failed attempt here too
        return None, error


async def _call_async(handler: Callable[..., Any], *arguments: object) -> tuple[object, BaseException | None]:
    try:
        return await handler(*arguments), None
    except BaseException as error:  # noqa: BLE001 - see _call
        return None, error


def _outcome(value: object, error: BaseException | None, message: Message) -> HandlerOutcome:
    """As the child and the queue's policy read it."""
    verdict = error if isinstance(error, Verdict) else value if isinstance(value, Verdict) else None
    if verdict is not None:
        return HandlerOutcome(verdict.kind, delay_s=verdict.delay_s, reason=verdict.reason)
    match error:
        case None:
            return HandlerOutcome("success", value=value, ack=message.ack)
        case InvalidMessage():
            return HandlerOutcome("invalid_message", error=error, reason=str(error))
        case Stopped() if message.stop_requested:
            return HandlerOutcome("stopped", error=error)
        case _:
            kind = "permanent" if getattr(error, "permanent", False) else "error"
            return HandlerOutcome(kind, error=error, reason=f"{type(error).__name__}: {error}")


def _committed(outcome: HandlerOutcome) -> HandlerOutcome:
    return HandlerOutcome(outcome.kind, value=outcome.value, ack=outcome.ack, committed=True)


def _refuse_ended(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """What the supervisor never acknowledges: an error that was swallowed, a transaction that was ended by hand."""
    status = connection.info.transaction_status
    if status is psycopg.pq.TransactionStatus.INERROR:
        raise AssertionError(
            "the handler swallowed an error that aborted its transaction: it would not be acknowledged"
        )

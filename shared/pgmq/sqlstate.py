"""Errors of the driver and of PostgreSQL, as ours: mapped in this one place, with what is known of the outcome.

Two things decide: the SQLSTATE (or its absence), and the moment. A connection that ends during a statement says
nothing about what the statement did, except where it could only read, or where its transaction had yet to commit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import psycopg

from shared.errors import (
    ConnectionLost,
    DatabaseError,
    OperationTimeout,
    SupervisorError,
    UnsupportedError,
    ValidationError,
)

__all__ = [
    "LIMIT_OF_STATEMENT",
    "LOST",
    "STANDBY",
    "Moment",
    "NoAnswer",
    "OutcomeUnknown",
    "WriteLate",
    "WriteLost",
    "ends_use",
    "first_line",
    "translate",
]


class Moment(StrEnum):
    """What was being done when an error came."""

    CONNECT = "connect"
    READ = "read"  # a statement of its own that changes nothing
    WRITE = "write"  # a statement of its own that commits itself
    TRANSACTION = "transaction"  # a statement of an open transaction
    COMMIT = "commit"


class NoAnswer(Exception):
    """The deadline of an answer has passed. No `OSError`, as `TimeoutError` is: the driver takes those for its own."""


class OutcomeUnknown(SupervisorError):
    """A write was sent and no answer came: it may have been done. Never sent again by us, never retryable."""

    default_retryable = False


class WriteLost(OutcomeUnknown, ConnectionLost):
    """The connection ended under a write."""

    default_retryable = False


class WriteLate(OutcomeUnknown, OperationTimeout):
    """A write was not answered in time, and its connection was given up."""

    default_retryable = False


_KNOWN: Final = {
    Moment.CONNECT: "nothing was sent",
    Moment.READ: "nothing was changed",
    Moment.WRITE: "the outcome is unknown, it was not sent again",
    Moment.TRANSACTION: "the transaction is rolled back",
    Moment.COMMIT: "the outcome of the commit is unknown, it was not sent again",
}
_IN_DOUBT: Final = frozenset({Moment.WRITE, Moment.COMMIT})
_IN_DOUBT_REMEDY: Final = "look for what was written, by a stable id of your own, before you write again"

# The session is over. 57P0x: shutdown, crash, starting up, dropped database, idle too long.
LOST: Final = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05"})
# The session is over because a limit in time ended it: idle in transaction, length of the transaction.
_LIMIT_OF_SESSION: Final = frozenset({"25P03", "25P04"})
# The statement is over because a limit in time ended it: statement_timeout or a cancellation, lock_timeout or NOWAIT.
LIMIT_OF_STATEMENT: Final = frozenset({"57014", "55P03"})
# Nothing was done, and the same may work a moment later: deadlock, serialization, object in use, a standby that is
# being promoted; and class 53, resources that ran out.
_TRANSIENT: Final = frozenset({"40001", "40P01", "55006", "25006"})
_TRANSIENT_CLASSES: Final = frozenset({"53"})

STANDBY: Final = "25006"
_REMEDIES: Final = {
    STANDBY: "the server is a standby, or the transaction is read-only",
    "42501": "grant what is missing, or use another role",
    "53300": "use fewer connections, or raise max_connections",
}
_NO_PGMQ: Final = "install PGMQ (pgmq-supervisor init), or a newer one; capabilities() tells what is there"
_NOT_INSTALLED: Final = frozenset({"3F000", "42883"})
_NO_SUCH_QUEUE: Final = "42P01"


def translate(error: BaseException, operation: str, moment: Moment, *, of_pgmq: bool = False) -> SupervisorError:
    """Turn what the driver raised into one of our errors.

    `of_pgmq`: the statement is one of ours, on queues; then a missing table is a missing queue.
    """
    if isinstance(error, SupervisorError):
        return error
    state = getattr(error, "sqlstate", None)
    text = first_line(error)
    if isinstance(error, NoAnswer | TimeoutError):
        return _late(error, "no answer in time", operation, moment, state)
    if _is_lost(error, state):
        return _lost(error, text, operation, moment, state)
    if state is None:
        # The driver refused it: a placeholder without a value, a value that no type of PostgreSQL can hold.
        return ValidationError(text, operation=operation)
    return _answered(error, text, operation, state, of_pgmq=of_pgmq)


def _is_lost(error: BaseException, state: str | None) -> bool:
    """Tell whether the session ended."""
    if state is not None:
        return state in LOST or state in _LIMIT_OF_SESSION or state.startswith("08")
    if isinstance(error, OSError):
        return True
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def _late(
    error: BaseException, text: str, operation: str, moment: Moment, state: str | None
) -> OperationTimeout | OutcomeUnknown:
    known = f"{text}; {_KNOWN[moment]}"
    if moment in _IN_DOUBT:
        return WriteLate(
            known, operation=operation, sqlstate=state, detail=_detail(error), remedy=_IN_DOUBT_REMEDY, retryable=False
        )
    return OperationTimeout(known, operation=operation, sqlstate=state, detail=_detail(error), retryable=True)


def _lost(error: BaseException, text: str, operation: str, moment: Moment, state: str | None) -> SupervisorError:
    if state in _LIMIT_OF_SESSION:
        return _late(error, text, operation, moment, state)
    known = f"{text}; {_KNOWN[moment]}"
    if moment in _IN_DOUBT:
        return WriteLost(
            known, operation=operation, sqlstate=state, detail=_detail(error), remedy=_IN_DOUBT_REMEDY, retryable=False
        )
    remedy = "look whether the DSN is right and the server is up" if moment is Moment.CONNECT else None
    return ConnectionLost(
        known, operation=operation, sqlstate=state, detail=_detail(error), remedy=remedy, retryable=True
    )


def _answered(error: BaseException, text: str, operation: str, state: str, *, of_pgmq: bool) -> SupervisorError:
    """Map an error that the server gave as its answer: the statement was not done, for certain."""
    detail = _detail(error)
    if state in LIMIT_OF_STATEMENT:
        return OperationTimeout(
            f"{text}; the statement was not done", operation=operation, sqlstate=state, detail=detail, retryable=True
        )
    if state.startswith("0A") or (of_pgmq and state in _NOT_INSTALLED):
        remedy = _NO_PGMQ if of_pgmq else None
        return UnsupportedError(text, operation=operation, sqlstate=state, detail=detail, remedy=remedy)
    if of_pgmq and state == "P0001" and "pg_partman" in text:
        return UnsupportedError(
            text, operation=operation, sqlstate=state, detail=detail, remedy="create extension pg_partman"
        )
    remedy = _REMEDIES.get(state)
    if of_pgmq and state == _NO_SUCH_QUEUE:
        remedy = "create the queue first"
    return DatabaseError(
        text,
        operation=operation,
        sqlstate=state,
        detail=detail,
        remedy=remedy,
        retryable=state in _TRANSIENT or state[:2] in _TRANSIENT_CLASSES,
    )


def ends_use(error: SupervisorError) -> bool:
    """Tell whether the connection should be replaced although it lives: its server can no longer write."""
    return error.sqlstate == STANDBY


def first_line(error: BaseException) -> str:
    """What an error says, without the lines that repeat the statement."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


def _detail(error: BaseException) -> str | None:
    """What else the server said: detail, hint, the constraint, where in a function it happened."""
    if not isinstance(error, psycopg.Error):
        return None
    diag = error.diag
    parts = {
        "detail": diag.message_detail,
        "hint": diag.message_hint,
        "constraint": diag.constraint_name,
        "table": diag.table_name,
        "context": diag.context,
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items() if value)[:2000] or None

"""Errors of the driver, as ours: mapped in this one place."""

from __future__ import annotations

from typing import Final

import psycopg

from shared.errors import ConnectionLost, DatabaseError, OperationTimeout, SupervisorError
from shared.pgmq.records import SettleFailure
from shared.pgmq.sqlstate import LIMIT_OF_STATEMENT, LOST, STANDBY, first_line

__all__ = [
    "connect_remedy",
    "is_of_the_message",
    "is_of_the_server",
    "is_permanent",
    "is_transient",
    "settle_failure",
    "translate",
]

# The session is of no use any more, or its server cannot write (a failover left us on the old primary).
_LOST_STATES: Final = LOST | {STANDBY}
_NO_SLOT: Final = (
    "the server has no connection left: raise max_connections, or let others have fewer; "
    "`pgmq-supervisor check` counts what we need"
)
_REFUSALS: Final = {
    "too many clients": _NO_SLOT,
    "remaining connection slots": _NO_SLOT,
    "too many connections for": "raise the CONNECTION LIMIT of this role or database, or lower [database] pool_size",
    "is starting up": "the server is not ready yet: start again when it is",
    "is shutting down": "the server is being stopped: start again when it is back",
    "in recovery mode": "the server is recovering from a crash: start again when it is ready",
}
_TRANSIENT: Final = frozenset({"40001", "40P01"})
# What one message can provoke: bad data, a program limit, memory, an internal limit of the server.
_OF_THE_MESSAGE: Final = frozenset({"22", "54", "53", "XX"})
# The same again tomorrow: data that cannot be, a limit of the program, what cannot be read any more. A full disk (53)
# passes.
_PERMANENT: Final = frozenset({"22", "54", "XX"})
# Nothing to do with one message: no transaction to write in, no right, no table, no room, somebody's lock, the disk.
_OF_THE_SERVER: Final = frozenset({"25", "28", "3D", "3F", "42", "53", "55", "57", "58"})


def translate(error: BaseException, operation: str) -> SupervisorError:
    """Turn whatever a statement raised into one of our errors; the session is to be dropped on `ConnectionLost`."""
    if isinstance(error, SupervisorError):
        return error
    state = getattr(error, "sqlstate", None)
    text = first_line(error)
    if isinstance(error, TimeoutError):
        return OperationTimeout("no answer in time", operation=operation)
    if isinstance(error, OSError):
        return ConnectionLost(text, operation=operation)
    if isinstance(error, psycopg.Error):
        if state in LIMIT_OF_STATEMENT:
            return OperationTimeout(text, operation=operation, sqlstate=state)
        if state in _LOST_STATES or (state or "").startswith("08"):
            return ConnectionLost(text, operation=operation, sqlstate=state)
        if state is None and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return ConnectionLost(text, operation=operation)
    return DatabaseError(text, operation=operation, sqlstate=state, retryable=state in _TRANSIENT)


def is_transient(error: SupervisorError) -> bool:
    """Tell whether the same statement may work when it is said again at once: deadlock, serialization."""
    return error.sqlstate in _TRANSIENT


def is_of_the_message(error: SupervisorError) -> bool:
    """Tell whether a single message may be what the server stumbled over."""
    return (error.sqlstate or "")[:2] in _OF_THE_MESSAGE


def is_permanent(error: SupervisorError) -> bool:
    """Tell whether a statement about one message will fail for ever."""
    return not _is_of_the_connection(error) and (error.sqlstate or "")[:2] in _PERMANENT


def is_of_the_server(error: SupervisorError) -> bool:
    """Tell whether every other message would most likely fail of the same."""
    return (error.sqlstate or "")[:2] in _OF_THE_SERVER


def settle_failure(error: SupervisorError, *, alone: bool) -> SettleFailure:
    """Say what a failed settlement means for its messages; `alone`: there was one."""
    if _is_of_the_connection(error):
        return SettleFailure.AWAY
    return SettleFailure.IMPOSSIBLE if alone and is_permanent(error) else SettleFailure.REFUSED


def _is_of_the_connection(error: SupervisorError) -> bool:
    return isinstance(error, ConnectionLost | OperationTimeout)


def connect_remedy(text: str) -> str | None:
    """Say what to do where a server answers and lets nobody in; None: nothing special is known.

    The driver gives no code for errors of connecting, so the text must do.
    """
    for known, remedy in _REFUSALS.items():
        if known in text:
            return remedy
    return None

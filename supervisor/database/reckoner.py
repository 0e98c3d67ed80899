"""The reckoner: settles transactional attempts whose commit nobody heard of, and ends sessions of killed children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, assert_never

import psycopg

from shared import syncpoints
from shared.errors import ConnectionLost, DatabaseError, SupervisorError
from shared.pgmq.records import DeadLetter, Reckoning, ReckonOutcome, Retry
from shared.pgmq.statements import transactions
from supervisor.core.commands import Reckon, TerminateBackend
from supervisor.core.events import Event, Reckoned
from supervisor.core.types import TxIdentity
from supervisor.database.connections import Connection
from supervisor.database.failures import translate
from supervisor.database.line import Line
from supervisor.database.sessions import Session
from supervisor.telemetry.facts import Fact, Noted

__all__ = ["Reckoner"]

_INT_MAX: Final = 2**31 - 1
_MAY_PASS: Final = frozenset({"", "25", "53", "55", "57", "58"})  # no room, somebody's lock, a standby, the disk


class Reckoner:
    """Answers every `Reckon` with one `Reckoned`. Uses one session of its own, opened before the children's.

    While that session lives there was no crash of the server, so that transaction numbers mean what they meant.
    """

    def __init__(self, session: Session, post: Callable[[Event], None], tell: Callable[[Fact], None]) -> None:
        self._session = session
        self._post = post
        self._tell = tell
        self._line: Line[Reckon | TerminateBackend] = Line("reckon", self._work, self._failed)

    def reckon(self, command: Reckon) -> None:
        """Start a reckoning."""
        self._line.put(command)

    def terminate_backend(self, command: TerminateBackend) -> None:
        """Start to end a session; nothing answers, the reckoning will see it."""
        if command.tx.xid is not None:
            self._line.put(command)

    async def _work(self, command: Reckon | TerminateBackend) -> None:
        if isinstance(command, TerminateBackend):
            await self._session.run("terminate backend", lambda connection: self._terminate(connection, command.tx))
        else:
            self._post(await self._reckon(command))

    def _failed(self, command: Reckon | TerminateBackend, error: Exception) -> None:
        failure = translate(error, "reckon")
        if isinstance(command, TerminateBackend):
            self._tell(Noted("database", "warning", f"the session of a killed child was not ended: {failure}"))
            return
        outcome = ReckonOutcome.REFUSED if _is_refused(failure) else ReckonOutcome.FAILED
        self._post(Reckoned(command.queue, command.claim_id, outcome, str(failure)))

    async def _terminate(self, connection: Connection, tx: TxIdentity) -> None:
        await connection.execute(
            transactions.TERMINATE_BACKEND, {"pid": tx.backend_pid, "start_us": tx.backend_start_us, "xid": tx.xid}
        )

    async def _reckon(self, command: Reckon) -> Reckoned:
        queue, wanted = command.queue, command.reckoning
        ids: dict[str, int | str] = {"queue": queue, "msg_id": wanted.msg_id}
        syncpoints.hit("parent.reckon.before", ids)
        try:
            row = await self._session.run("reckon", lambda connection: self._say(connection, queue, wanted))
        except ConnectionLost:
            # It may have been carried out: what it wrote, if anything, tells.
            row = await self._session.run("reckon", lambda connection: self._say(connection, queue, wanted))
        syncpoints.hit("parent.reckon.after", ids)
        outcome = _judge(wanted, row)
        tx = command.tx
        if tx is None or tx.xid is None or outcome is ReckonOutcome.DONE:
            return Reckoned(queue, command.claim_id, outcome)
        if outcome is ReckonOutcome.BUSY:
            if not await self._session.run("look for a session", lambda connection: self._is_at_work(connection, tx)):
                outcome = ReckonOutcome.TAKEN
            return Reckoned(queue, command.claim_id, outcome)
        status = await self._status(tx)
        committed = {"committed": True, "aborted": False}.get(status)
        return Reckoned(queue, command.claim_id, outcome, f"transaction {status}", committed)

    async def _say(self, connection: Connection, queue: str, wanted: Reckoning) -> tuple[Any, ...]:
        parameters: dict[str, Any] = {
            "msg_id": wanted.msg_id,
            "before": wanted.read_ct_before,
            "read_us": wanted.read_at_us,
        }
        match wanted.settlement:
            case Retry(delay_ms=delay_ms, accounts=accounts):
                statement = transactions.reckon_retry(queue)
                parameters |= {"delay_ms": delay_ms, "accounts": accounts, "after": _read_ct_after(wanted)}
            case DeadLetter(queue=target, envelope=envelope):
                statement = transactions.reckon_dead_letter(queue)
                parameters |= {"target": target, "envelope": envelope}
            case never:
                assert_never(never)
        cursor = await connection.execute(statement, parameters)
        row = await cursor.fetchone()
        assert row is not None
        return row

    async def _is_at_work(self, connection: Connection, tx: TxIdentity) -> bool:
        cursor = await connection.execute(
            transactions.IS_AT_WORK, {"pid": tx.backend_pid, "start_us": tx.backend_start_us, "xid": tx.xid}
        )
        row = await cursor.fetchone()
        return bool(row and row[0])

    async def _status(self, tx: TxIdentity) -> str:
        """Name the outcome of a transaction: "committed", "aborted", "in progress" or "unknown"."""

        async def ask(connection: Connection) -> str:
            try:
                cursor = await connection.execute(
                    transactions.XACT_STATUS, {"xid": str(tx.xid), "start_us": tx.backend_start_us}
                )
                row = await cursor.fetchone()
            except psycopg.DatabaseError:
                return "unknown"  # "in the future", or too old to be known
            return (row[0] if row else None) or "unknown"

        try:
            return await self._session.run("transaction status", ask)
        except SupervisorError:
            return "unknown"  # the row has decided; this was only its name

    async def open(self) -> None:
        """Open the session before any child has one. Raises `SupervisorError`."""

        async def nothing(connection: Connection) -> None:
            await connection.execute(b"select 1")

        await self._session.run("connect", nothing)

    async def close(self) -> None:
        """Stop."""
        await self._line.close()
        self._session.drop()


def _read_ct_after(wanted: Reckoning) -> int:
    return min(_INT_MAX, wanted.read_ct_before + 1 + wanted.extra)


def _judge(wanted: Reckoning, row: tuple[Any, ...]) -> ReckonOutcome:
    """Let the row decide: (rows served, read_ct and last_read_at that were seen)."""
    served, read_ct, read_us = row
    if served:
        return ReckonOutcome.DONE
    if read_ct is None:
        return ReckonOutcome.GONE
    if (read_ct, read_us) == (_read_ct_after(wanted), wanted.read_at_us + 1):
        return ReckonOutcome.OURS
    if read_ct == wanted.read_ct_before or (read_ct, read_us) == (wanted.read_ct_before + 1, wanted.read_at_us):
        return ReckonOutcome.BUSY
    return ReckonOutcome.MOVED


def _is_refused(error: SupervisorError) -> bool:
    """Tell whether PostgreSQL answered, and would answer the same in a moment."""
    return isinstance(error, DatabaseError) and not error.retryable and (error.sqlstate or "")[:2] not in _MAY_PASS

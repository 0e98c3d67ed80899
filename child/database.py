"""The child's database session: one connection, one transaction a message, and the looks that tell what became of it.

Nothing here outlives its transaction on the server's side, so that a transaction pooler may stand between. The handler
shares the connection; whatever it did to it, `check` finds out before anything is asked of the parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from child.transaction import Outbox, Row
from shared.pgmq.statements import queues, transactions
from shared.pgmq.statements.claiming import next_visible
from shared.pgmq.statements.sessions import SAVEPOINT, claim_stands, limits

_CONNECT_TIMEOUT_S: Final = "10"
_KEEPALIVE: Final = {"keepalives": "1", "keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}
_SERVER_KEEPALIVE: Final = {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
_CHECK_CLIENT: Final = {"client_connection_check_interval": "500"}
_CHECK_CLIENT_SINCE: Final = 140000
_NO_SUCH_SETTING: Final = frozenset({"22023", "42704", "42501", "0A000"})
_BACK: Final = b"rollback to savepoint " + SAVEPOINT.encode()
_NO_SAVEPOINT: Final = frozenset({"3B001", "25P01"})


class ClaimRow(NamedTuple):
    """The columns of `claim_one`."""

    msg_id: int
    read_ct: int
    enqueued_us: int
    visible_us: int
    accounts: str | None
    xid: int | None
    backend_pid: int
    backend_start_us: int


class Claim(NamedTuple):
    """A message claimed in the open transaction."""

    row: ClaimRow
    headers: bytes
    body: bytes | None


class LastWords(NamedTuple):
    """What the server said before it closed the session: the cause that the client's own error does not know."""

    sqlstate: str | None
    text: str


class Fault(Exception):
    """The transaction is not what it was when the handler got it."""

    def __init__(self, kind: str, text: str, *, mendable: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.mendable = mendable  # back to the savepoint may bring it into order


class CommitInDoubt(Exception):
    """COMMIT was sent, and no answer came."""


class Database:
    """One session, opened when it is first needed and again after it was lost."""

    def __init__(self, *, dsn: str, application_name: str, queue: str, own_timeout_ms: int) -> None:
        self._dsn = dsn
        self._application_name = application_name
        self._queue = queue
        self._own_timeout_ms = own_timeout_ms
        self._connection: psycopg.Connection[Row] | None = None
        self._twin: psycopg.AsyncConnection[Row] | None = None
        self._can_check_client = True
        self.last_words: LastWords | None = None

    # --- the session ------------------------------------------------------------------------------------------------

    def open(self) -> psycopg.Connection[Row]:
        """The connection, idle and as if new to the handler. Raises `psycopg.Error` when there is none to be had."""
        connection = self._connection
        if connection is not None and (
            connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE
        ):
            self.close()
            connection = None
        if connection is None:
            connection = self._connection = self._connect()
        self.last_words = None
        connection.row_factory = tuple_row
        connection.cursor_factory = psycopg.Cursor
        connection.prepare_threshold = None
        return connection

    def open_twin(self) -> psycopg.AsyncConnection[Row]:
        """The same session for async handlers: a second face of one libpq connection, never used at the same time."""
        connection = self.held()
        if self._twin is None:
            self._twin = psycopg.AsyncConnection(connection.pgconn)
            self._twin.add_notice_handler(self._hear)  # it has taken the place of the other one's
        self._twin.row_factory = tuple_row
        self._twin.cursor_factory = psycopg.AsyncCursor
        self._twin.prepare_threshold = None
        return self._twin

    def close(self) -> None:
        """Let it go; the server rolls back what was open."""
        connection, self._connection, self._twin = self._connection, None, None
        if connection is not None:
            connection.close()

    def _connect(self) -> psycopg.Connection[Row]:
        given = psycopg.conninfo.conninfo_to_dict(self._dsn)
        options = {"connect_timeout": _CONNECT_TIMEOUT_S, "application_name": self._application_name, **_KEEPALIVE}
        connection = psycopg.connect(
            self._dsn,
            prepare_threshold=None,
            **{key: value for key, value in options.items() if key not in given},  # type: ignore[arg-type]
        )
        connection.add_notice_handler(self._hear)
        return connection

    def _hear(self, said: psycopg.errors.Diagnostic) -> None:
        """A farewell that arrives while nothing is asked comes as a notice."""
        if said.severity_nonlocalized == "FATAL":
            self.last_words = LastWords(said.sqlstate, said.message_primary or "")

    def held(self) -> psycopg.Connection[Row]:
        """The connection of the open transaction."""
        if self._connection is None:
            raise psycopg.OperationalError("the connection is lost")
        return self._connection

    def _pipeline(self) -> AbstractContextManager[object]:
        return self.held().pipeline() if psycopg.Pipeline.is_supported() else nullcontext()

    def _run(
        self, query: bytes, params: Mapping[str, Any] | None = None, *, binary: bool = False
    ) -> psycopg.Cursor[Row]:
        cursor = psycopg.Cursor(self.held(), row_factory=tuple_row)
        cursor.execute(query, params, binary=binary)
        return cursor

    def _limit(self, settings: Mapping[str, str]) -> None:
        self._run(limits(tuple(settings.items())))

    # --- the claim --------------------------------------------------------------------------------------------------

    def claim(self, time_limit_ms: int | None, report: Callable[[ClaimRow], None]) -> Claim | None:
        """Begin, claim one message, set the savepoint, load the body: one round trip.

        `report` is called with the ids before the body is waited for. None: nothing to claim, and the transaction is
        still open for `next_visible_s`. Raises `psycopg.Error`.
        """
        connection = self.open()
        try:
            return self._claim(connection, time_limit_ms, report)
        except psycopg.Error as error:
            if not self._can_check_client or error.sqlstate not in _NO_SUCH_SETTING or connection.closed:
                raise
            self._can_check_client = False  # a server on a platform that cannot see its clients go
            connection.rollback()
            return self._claim(connection, time_limit_ms, report)

    def _claim(
        self, connection: psycopg.Connection[Row], time_limit_ms: int | None, report: Callable[[ClaimRow], None]
    ) -> Claim | None:
        limit = "0" if time_limit_ms is None else str(max(1, time_limit_ms))
        at_first = {"statement_timeout": str(self._own_timeout_ms), **_SERVER_KEEPALIVE}
        if self._can_check_client and connection.info.server_version >= _CHECK_CLIENT_SINCE:
            at_first |= _CHECK_CLIENT
        with self._pipeline():
            self._limit(at_first)
            claimed = self._run(transactions.claim_one(self._queue))
            self._limit({"statement_timeout": limit, "idle_in_transaction_session_timeout": limit})
            self._run(b"savepoint " + SAVEPOINT.encode())
            content = self._run(transactions.claimed_body(self._queue), binary=True)
            found = claimed.fetchone()
            if found is None:
                return None
            row = ClaimRow(*found[: len(ClaimRow._fields)])
            report(row)
            texts = content.fetchone()
        if texts is None:
            raise psycopg.DataError(f"message {row.msg_id} was claimed and cannot be read")
        return Claim(row, texts[0] or b"", texts[1])

    def next_visible_s(self) -> float | None:
        """After an empty claim: seconds until a message becomes visible, None without one. Ends the transaction."""
        found = self._run(next_visible(self._queue), {"since_us": None}).fetchone()
        self.roll_back()
        return None if found is None else found[0]

    # --- the end ----------------------------------------------------------------------------------------------------

    def check(self, claim: ClaimRow, *, undo: bool) -> None:
        """Find out whether the transaction still is the one of the claim. `undo`: back to the savepoint first.

        Raises `Fault` with the reason when it is not, `psycopg.Error` when the server cannot be asked.
        """
        self._check_state(undo=undo)
        look = {"msg_id": claim.msg_id, "timeout_ms": str(self._own_timeout_ms)}
        try:
            if undo:
                self._run(_BACK)
            found = self._run(claim_stands(self._queue), look).fetchone()
        except psycopg.Error as error:
            if error.sqlstate in _NO_SAVEPOINT:
                raise _ended_by_handler() from error
            raise
        xid, read_ct, visible_us, _ = found if found is not None else (None, None, None, None)
        if xid is None or xid != claim.xid:
            raise _ended_by_handler()
        if read_ct is None:
            raise Fault("AcknowledgedByHand", "the handler deleted or archived its own message", mendable=True)
        if (read_ct, visible_us) != (claim.read_ct, claim.visible_us):
            raise Fault("AcknowledgedByHand", "the handler changed the visibility of its own message", mendable=True)

    def _check_state(self, *, undo: bool) -> None:
        """What the client side knows, without asking the server."""
        connection = self._connection
        if connection is None or connection.closed or connection.pgconn.status != ConnStatus.OK:
            raise Fault("ConnectionLost", "the connection of the transaction is gone")
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise Fault("ConnectionLeftBusy", "the handler left the connection in a pipeline")
        match connection.info.transaction_status:
            case TransactionStatus.IDLE:
                raise _ended_by_handler()
            case TransactionStatus.ACTIVE:
                raise Fault("ConnectionLeftBusy", "the handler left a statement or a COPY running")
            case TransactionStatus.INERROR if not undo:
                text = "an error inside the handler aborted the transaction, and the handler went on as if it had not"
                raise Fault("TransactionAborted", text, mendable=True)
            case _:
                return

    def acknowledge(self, claim: ClaimRow, mode: str, outbox: Outbox) -> None:
        """Send what waits, delete or archive the message, keep the handler's work. Not committed yet."""
        statement = transactions.tx_ack_archive if mode == "archive" else transactions.tx_ack_delete
        outgoing = outbox.sorted()
        values = {"msg_id": claim.msg_id, "read_ct": claim.read_ct}
        with self._pipeline() if outgoing else nullcontext():
            for message in outgoing:
                self._run(queues.SEND, message.parameters())
            _exactly_one(self._run(statement(self._queue), values))

    def retry(self, claim: ClaimRow, *, delay_ms: int, accounts: str | None, read_ct: int | None) -> None:
        """Undo the handler's work and make the message visible after the delay. Not committed yet."""
        values = {"delay_ms": delay_ms, "accounts": accounts, "set_read_ct": read_ct}
        self._undo_and(transactions.tx_retry(self._queue), claim, values)

    def dead_letter(self, claim: ClaimRow, *, queue: str, envelope: str) -> None:
        """Undo the handler's work and move the message. Not committed yet."""
        values = {"target": queue, "envelope": envelope}
        self._undo_and(transactions.tx_dead_letter(self._queue), claim, values)

    def _undo_and(self, statement: bytes, claim: ClaimRow, values: dict[str, Any]) -> None:
        with self._pipeline():
            self._run(_BACK)
            self._limit({"statement_timeout": str(self._own_timeout_ms)})
            done = self._run(statement, {"msg_id": claim.msg_id, "read_ct": claim.read_ct, **values})
            _exactly_one(done)

    def commit(self) -> None:
        """COMMIT, and believe only PostgreSQL's own word.

        Raises `psycopg.Error` when it refused (a deferred constraint), `CommitInDoubt` when the connection was lost:
        even an error that came before that end may follow a commit.
        """
        connection = self.held()
        try:
            done = self._run(b"commit")
        except psycopg.Error as error:
            if connection.closed or connection.pgconn.status != ConnStatus.OK:
                raise CommitInDoubt(str(error)) from error
            raise
        if done.statusmessage != "COMMIT":
            raise Fault("TransactionAborted", f"PostgreSQL answered COMMIT with {done.statusmessage}")

    def roll_back(self) -> None:
        """Undo everything; a connection that cannot do that is closed, which does the same."""
        try:
            self.held().rollback()
        except psycopg.Error:
            self.close()


def _ended_by_handler() -> Fault:
    return Fault("TransactionEndedByHandler", "the handler committed or rolled back the transaction of its message")


def _exactly_one(done: psycopg.Cursor[Row]) -> None:
    if len(done.fetchall()) != 1:
        raise Fault("AcknowledgedByHand", "the message was not there any more when it was to be settled")

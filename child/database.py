"""The child's database session: one connection, one transaction a message, and the looks that tell what became of it.

What lives longer than a transaction on the server's side is made only where no pooler stands between: two prepared
statements and a few settings. The handler shares the connection; whatever it did to it is found out before or with the
acknowledgement, which goes through only in the transaction of the claim and on the row as the claim left it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import psycopg
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from child.session import Row, fill, say
from child.transaction import Outbox
from shared.pgmq.libpq import KEEPALIVE
from shared.pgmq.statements import queues, sessions, transactions
from shared.pgmq.statements.claiming import next_visible

_TRIES: Final = 3
_CONNECT_TIMEOUT_S: Final = "10"
_CHECK_CLIENT_SINCE: Final = 140000
_NO_SUCH_SETTING: Final = frozenset({"22023", "42704", "42501", "0A000"})
_NO_SUCH_STATEMENT: Final = "26000"
_OUTDATED_STATEMENT: Final = "0A000"  # the columns of the queue's table are others now
_SAVEPOINT: Final = b"savepoint " + sessions.SAVEPOINT.encode()
_BACK: Final = b"rollback to savepoint " + sessions.SAVEPOINT.encode()
_LIMIT: Final = b"set local statement_timeout = %d"
_NO_SAVEPOINT: Final = frozenset({"3B001", "25P01"})
_UNREADABLE: Final = frozenset({"54000", "22021", "22P05"})  # of a body that no retry will make readable

# What a claim says, in this order.
_CLAIMED: Final = 2
_SAVED: Final = 3
_CONTENT: Final = 4


class ClaimRow(NamedTuple):
    """What `claim_one` tells, but for what only sets something."""

    msg_id: int
    read_ct: int
    read_us: int
    enqueued_us: int
    visible_us: int
    accounts: str | None
    place: str
    xid: int
    backend_pid: int
    backend_start_us: int
    touched: bool  # whoever had it before did not commit


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


class Unreadable(Exception):
    """The message was claimed, and neither this nor any later attempt will get its body."""

    def __init__(self, row: ClaimRow, text: str) -> None:
        super().__init__(text)
        self.row = row
        self.text = text


class _OtherSession(psycopg.OperationalError):
    """The server's session is not the one that greeted."""


class Database:
    """One session, opened when it is first needed and again after it was lost."""

    def __init__(self, *, dsn: str, application_name: str, queue: str, lease_ms: int, own_timeout_ms: int) -> None:
        self._dsn = dsn
        self._application_name = application_name
        self._queue = queue
        self._lease_ms = lease_ms
        self._own_timeout_ms = own_timeout_ms
        self._connection: psycopg.Connection[Row] | None = None
        self._twin: psycopg.AsyncConnection[Row] | None = None
        self._pooled = False
        self._seqscan: str | None = None  # what the handler's statements find `enable_seqscan` at, where we changed it
        self._started_us = 0  # the session, by the server's clock; only known where it is ours alone
        self._can_check_client = True
        self.last_words: LastWords | None = None

    # --- the session ------------------------------------------------------------------------------------------------

    def open(self) -> psycopg.Connection[Row]:
        """The connection, idle and as if new to the handler. Raises `psycopg.Error` when there is none to be had."""
        connection = self._connection
        if connection is not None and not self._is_idle(connection):
            self.close()
            connection = None
        if connection is None:
            connection = self._connect()
        self.last_words = None
        connection.row_factory = tuple_row
        connection.cursor_factory = psycopg.Cursor
        connection.prepare_threshold = None
        return connection

    def _is_idle(self, connection: psycopg.Connection[Row]) -> bool:
        """Whether a claim can be said: what the server ended meanwhile is replaced, and no claim fails of it."""
        idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
        return idle and not self._has_ended(connection)

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
        options = {"connect_timeout": _CONNECT_TIMEOUT_S, "application_name": self._application_name, **KEEPALIVE}
        connection = self._connection = psycopg.connect(
            self._dsn,
            autocommit=False,
            prepare_threshold=None,
            client_encoding="utf8",
            **{key: value for key, value in options.items() if key not in given},  # type: ignore[arg-type]
        )
        connection.add_notice_handler(self._hear)
        self._can_check_client = self._can_check_client and connection.info.server_version >= _CHECK_CLIENT_SINCE
        self._get_acquainted(connection)
        return connection

    def _get_acquainted(self, connection: psycopg.Connection[Row]) -> None:
        """Find out whether the session is ours alone: a transaction pooler makes up the number that it greets with."""
        [session] = say(connection, sessions.SESSION)
        pid, started_us = int(session.get_value(0, 0) or 0), int(session.get_value(0, 1) or 0)
        self._seqscan = (session.get_value(0, 2) or b"on").decode()
        self._pooled = pid != connection.info.backend_pid
        self._started_us = started_us
        if self._pooled:
            return
        if self._can_check_client:
            try:
                say(connection, sessions.limits(sessions.NOTICE_ITS_END, local=False))
            except psycopg.Error as error:
                self._cannot_check_client(error)
        say(connection, sessions.limits(sessions.KEEPALIVE, local=False))
        self._prepare(connection)

    def _cannot_check_client(self, error: psycopg.Error) -> None:
        """A server on a platform that cannot see its clients go."""
        if error.sqlstate not in _NO_SUCH_SETTING:
            raise error
        self._can_check_client = False

    def _prepare(self, connection: psycopg.Connection[Row]) -> None:
        """Planning a claim costs several times as much as carrying it out."""
        say(connection, sessions.limits(sessions.INDEXES_ONLY, local=False))
        claim = transactions.claim_one(self._queue, pooled=False)
        for place, parameter in ((b"%(lease_ms)s", b"$1"), (b"%(limit_ms)s", b"$2")):
            claim = claim.replace(place, parameter)
        for words in (
            f"prepare {sessions.PREPARED_CLAIM}(bigint, text) as ".encode() + claim,
            f"prepare {sessions.PREPARED_BODY} as ".encode() + transactions.claimed_body(self._queue, self._seqscan),
        ):
            try:
                say(connection, words)
            except psycopg.errors.DuplicatePreparedStatement:
                continue  # only the other one was gone

    def _hear(self, said: psycopg.errors.Diagnostic) -> None:
        """A farewell that arrives while nothing is asked comes as a notice."""
        if said.severity_nonlocalized == "FATAL":
            self.last_words = LastWords(said.sqlstate, said.message_primary or "")

    def held(self) -> psycopg.Connection[Row]:
        """The connection of the open transaction."""
        if self._connection is None:
            raise psycopg.OperationalError("the connection is lost")
        return self._connection

    def _say(self, *statements: bytes) -> list[PGresult]:
        return say(self.held(), b"; ".join(statements))

    def _fill(self, statement: bytes, **values: object) -> bytes:
        return fill(self.held(), statement, values)

    # --- the claim --------------------------------------------------------------------------------------------------

    def claim(self, limit_ms: int | None, report: Callable[[ClaimRow, bool], None]) -> Claim | None:
        """Begin, claim one message, set the savepoint, load the body: one message to the server.

        `limit_ms` bounds the handler's statements and its silence. `report` gets the ids as soon as they are there,
        and whether the body still has to be waited for. None: nothing to claim, and the transaction is still open for
        `next_visible_s`. Raises `psycopg.Error`, and after a report `Unreadable`.
        """
        told = False

        def tell(row: ClaimRow, waits: bool) -> None:
            nonlocal told
            told = True
            report(row, waits)

        for _ in range(_TRIES):
            connection = self.open()
            try:
                return self._claim(connection, "0" if limit_ms is None else str(max(1, limit_ms)), tell)
            except psycopg.Error as error:
                if told or not self._mend(connection, error):
                    raise
        raise psycopg.OperationalError("the session cannot be brought into order")

    def _mend(self, connection: psycopg.Connection[Row], error: psycopg.Error) -> bool:
        """Whether the claim may be said again, now that something about the session was put right."""
        self.roll_back()
        if self._connection is None:
            return False
        if isinstance(error, _OtherSession):
            self._pooled = True
            return True
        if self._pooled:
            if error.sqlstate not in _NO_SUCH_SETTING or not self._can_check_client:
                return False
            self._can_check_client = False
            return True
        if error.sqlstate == _NO_SUCH_STATEMENT:
            self._prepare(connection)  # the handler's driver cleans up by deallocating all
            return True
        if error.sqlstate == _OUTDATED_STATEMENT:
            self.close()
            return True
        return False

    def _claim(
        self, connection: psycopg.Connection[Row], limit: str, report: Callable[[ClaimRow, bool], None]
    ) -> Claim | None:
        row: ClaimRow | None = None

        def hear(which: int, result: PGresult) -> None:
            nonlocal row
            if which == _CLAIMED and result.ntuples:
                row = self._row_of(result)
            elif which == _SAVED and row is not None and self._is_ours(row):
                report(row, bool(connection.pgconn.is_busy()))

        try:
            results = say(connection, self._words_of_claim(connection, limit), hear)
        except psycopg.Error as error:
            if row is None or error.sqlstate not in _UNREADABLE:
                raise
            raise Unreadable(row, str(error)) from error
        if row is None:
            return None
        if not self._is_ours(row):
            raise _OtherSession("a pooler stands between")
        content = results[_CONTENT]
        if not content.ntuples:
            raise psycopg.DataError(f"message {row.msg_id} was claimed and cannot be read")
        return Claim(row, content.get_value(0, 0) or b"", content.get_value(0, 1))

    def _words_of_claim(self, connection: psycopg.Connection[Row], limit: str) -> bytes:
        if connection.pgconn.parameter_status(b"client_encoding") != b"UTF8":
            say(connection, b"set client_encoding = 'utf8'")
        if not self._pooled:
            return (
                f"begin; set local statement_timeout = {self._own_timeout_ms};"
                f" execute {sessions.PREPARED_CLAIM}({self._lease_ms}, '{limit}');"
                f" savepoint {sessions.SAVEPOINT}; execute {sessions.PREPARED_BODY}"
            ).encode()
        settings: tuple[tuple[str, str], ...] = (("statement_timeout", str(self._own_timeout_ms)), *sessions.KEEPALIVE)
        if self._can_check_client:
            settings += sessions.NOTICE_ITS_END
        claim = transactions.claim_one(self._queue, pooled=True)
        return b"; ".join(
            (
                b"begin",
                sessions.limits(settings, local=True),
                fill(connection, claim, {"lease_ms": self._lease_ms, "limit_ms": limit}),
                _SAVEPOINT,
                transactions.claimed_body(self._queue),
            )
        )

    def _is_ours(self, row: ClaimRow) -> bool:
        """Whether what is known of the session is true of the one that claimed."""
        return self._pooled or row.backend_pid == self.held().info.backend_pid

    def _row_of(self, result: PGresult) -> ClaimRow:
        get = result.get_value
        accounts = get(0, 5)
        started_us = get(0, 9)
        return ClaimRow(
            int(get(0, 0) or 0),
            int(get(0, 1) or 0),
            int(get(0, 2) or 0),
            int(get(0, 3) or 0),
            int(get(0, 4) or 0),
            None if accounts is None else accounts.decode(),
            (get(0, 6) or b"").decode(),
            int(get(0, 7) or 0),
            int(get(0, 8) or 0),
            self._started_us if started_us is None else int(started_us),
            get(0, 10) == b"t",
        )

    def next_visible_s(self) -> float | None:
        """After an empty claim: seconds until a message becomes visible, None without one. Ends the transaction."""
        found, _ = self._say(self._fill(next_visible(self._queue), since_us=None), b"rollback")
        value = found.get_value(0, 0) if found.ntuples else None
        return None if value is None else float(value)

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_state(self) -> None:
        """Raise `Fault` where the client's side alone knows that the transaction cannot be committed any more."""
        connection = self._connection
        if connection is None or self._has_ended(connection):
            raise Fault("ConnectionLost", "the connection of the transaction is gone")
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise Fault("ConnectionLeftBusy", "the handler left the connection in a pipeline")
        match connection.pgconn.transaction_status:
            case TransactionStatus.INTRANS:
                return
            case TransactionStatus.INERROR:
                text = "an error inside the handler aborted the transaction, and the handler went on as if it had not"
                raise Fault("TransactionAborted", text, mendable=True)
            case TransactionStatus.ACTIVE:
                raise Fault("ConnectionLeftBusy", "the handler left a statement or a COPY running")
            case TransactionStatus.IDLE:
                raise _ended_by_handler()
            case _:
                raise Fault("ConnectionLost", "the connection of the transaction is gone")

    def _has_ended(self, connection: psycopg.Connection[Row]) -> bool:
        """Whether the server's farewell or the end of the stream has come in, perhaps unread so far."""
        pgconn = connection.pgconn
        if pgconn.transaction_status != TransactionStatus.ACTIVE and connection.lock.acquire(blocking=False):
            try:
                pgconn.consume_input()
                pgconn.is_busy()  # takes apart what was read: a farewell is heard as a notice
            except psycopg.Error:
                return True
            finally:
                connection.lock.release()
        return self.last_words is not None or pgconn.status != ConnStatus.OK

    def undo(self, claim: ClaimRow) -> None:
        """Back to the savepoint, and find out whether the transaction still is the one of the claim.

        Raises `Fault` with the reason when it is not, `psycopg.Error` when the server cannot be asked.
        """
        try:
            self.check_state()
        except Fault as fault:
            if not fault.mendable:
                raise
        look = self._fill(sessions.claim_stands(self._queue), msg_id=claim.msg_id, timeout_ms=str(self._own_timeout_ms))
        try:
            _, found = self._say(_BACK, look)
        except psycopg.Error as error:
            if error.sqlstate in _NO_SAVEPOINT:
                raise _ended_by_handler() from error
            raise
        xid, place = found.get_value(0, 0), found.get_value(0, 1)
        if xid is None or int(xid) != claim.xid or place is None or place.decode() != claim.place:
            raise _ended_by_handler()

    def acknowledge(self, claim: ClaimRow, mode: str, outbox: Outbox) -> None:
        """Delete or archive the message, and send what waits; keep the handler's work. Not committed yet.

        Raises `Fault` where this is not the transaction of the claim any more, or the handler has touched its message.
        """
        statement = transactions.tx_ack_archive if mode == "archive" else transactions.tx_ack_delete
        ack = self._fill(statement(self._queue), place=claim.place, msg_id=claim.msg_id, xid=claim.xid)
        sends = [self._fill(queues.SEND, **message.parameters()) for message in outbox.sorted()]
        if self._say(_LIMIT % self._own_timeout_ms, ack, *sends)[1].ntuples != 1:
            self.undo(claim)  # says so where it is not the transaction any more
            raise Fault("AcknowledgedByHand", "the handler deleted, archived or changed its own message")

    def retry(self, claim: ClaimRow, *, delay_ms: int, accounts: str | None, read_ct: int | None) -> None:
        """Undo the handler's work and make the message visible after the delay. Not committed yet."""
        values: dict[str, object] = {
            "delay_ms": delay_ms,
            "accounts": accounts,
            "read_us": claim.read_us,
            "set_read_ct": read_ct,
        }
        self._undo_and(transactions.tx_retry(self._queue), claim, values)

    def dead_letter(self, claim: ClaimRow, *, queue: str, envelope: str) -> None:
        """Undo the handler's work and move the message. Not committed yet."""
        self._undo_and(transactions.tx_dead_letter(self._queue), claim, {"target": queue, "envelope": envelope})

    def _undo_and(self, statement: bytes, claim: ClaimRow, values: dict[str, object]) -> None:
        done = self._fill(statement, place=claim.place, msg_id=claim.msg_id, xid=claim.xid, **values)
        if self._say(_BACK, _LIMIT % self._own_timeout_ms, done)[2].ntuples != 1:
            raise Fault("AcknowledgedByHand", "the message was not there any more when it was to be settled")

    def commit(self) -> None:
        """COMMIT, and believe only PostgreSQL's own word.

        Raises `psycopg.Error` when it refused (a deferred constraint), `CommitInDoubt` when the connection was lost:
        even an error that came before that end may follow a commit.
        """
        connection = self.held()
        try:
            [done] = self._say(b"commit")
        except psycopg.Error as error:
            if connection.pgconn.status != ConnStatus.OK:
                raise CommitInDoubt(str(error)) from error
            raise
        if done.command_status != b"COMMIT":
            raise Fault("TransactionAborted", f"PostgreSQL answered COMMIT with {done.command_status!r}")

    def postpone(self, claim: ClaimRow, delay_ms: int) -> None:
        """Give the claim up, and let nobody have the message for a moment. Raises `psycopg.Error`."""
        pause = self._fill(
            transactions.tx_postpone(self._queue), msg_id=claim.msg_id, before=claim.read_ct - 1, delay_ms=delay_ms
        )
        self._say(b"rollback", pause)

    def roll_back(self) -> None:
        """Undo everything; a connection that cannot do that is closed, which does the same."""
        try:
            self._say(b"rollback")
        except psycopg.Error:
            self.close()


def _ended_by_handler() -> Fault:
    return Fault("TransactionEndedByHandler", "the handler committed or rolled back the transaction of its message")

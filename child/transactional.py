"""Transactional mode: the child owns the transaction, the parent owns the decisions to claim and to commit.

    PERMIT ──▶ claim ──▶ TX_CLAIMED, STARTED ──▶ handler ──▶ check ──▶ COMMIT_REQUEST ──▶ VERDICT ──▶ COMMITTED
                 │                                            │                              │
                 ├──▶ TX_EMPTY                                └────────── TX_ENDED ◀─────────┘

A commit is asked for only while the transaction is provably the one of the claim. Everything else is TX_ENDED: the
parent then looks at the row, which is the proof of what happened (failure model: attempt ends without a commit).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import psycopg

from child.abandoned import Abandoned
from child.attempts import count_attempt
from child.caller import Caller
from child.channel import Channel, Work
from child.database import Claim, ClaimRow, CommitInDoubt, Database, Fault, LastWords
from child.farewell import flush_output
from child.message import Message
from child.outcomes import Meta, describe, failure, find_sqlstate, without_our_frames
from child.process import calm_signals
from child.results import fit_result
from child.transaction import AsyncTransaction, Outbox, Transaction
from shared import syncpoints
from shared.text import clean_text
from shared.wire.frames import DispatchHead, Frame, Kind, ProtocolError, encode

if TYPE_CHECKING:
    from child.title import Title

_DEFAULT_TIMEOUT_MS: Final = 30_000
_ENDED_BY_HANDLER: Final = frozenset({"TransactionEndedByHandler", "ConnectionLeftBusy"})


def make_step(
    channel: Channel, handler: Callable[..., Any], title: Title, hello: dict[str, Any]
) -> Callable[[Frame | Work], None]:
    """The function that serves one PERMIT. Raises `Disconnected` and `ProtocolError`, nothing else."""
    try:
        database = Database(
            dsn=hello["dsn"],
            application_name=hello.get("application_name") or "pgmq-supervisor",
            queue=hello["queue"],
            own_timeout_ms=int(hello.get("statement_timeout_ms") or _DEFAULT_TIMEOUT_MS),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"HELLO lacks or mangles {error}") from error
    return _Worker(channel, handler, title, hello["queue"], database).serve


class _Worker:
    """Serves permits, one after another, over one session."""

    def __init__(
        self, channel: Channel, handler: Callable[..., Any], title: Title, queue: str, database: Database
    ) -> None:
        self._channel = channel
        self._caller = Caller(handler, channel, with_sqlstate=True)
        self._is_async = _is_async(handler)
        self._title = title
        self._queue = queue
        self._database = database
        self._abandoned = Abandoned(channel)

    def serve(self, frame: Frame | Work) -> None:
        """One permit: from BEGIN to an answer that frees us."""
        if isinstance(frame, Work):
            raise ProtocolError("DISPATCH in transactional mode")
        seq = frame.seq
        self._channel.begin(seq)
        self._title.show_claiming()
        syncpoints.hit("child.tx.before_claim")
        claim = self._claim(seq, frame.meta)
        if claim is not None:
            self._work(seq, claim, frame.meta)
        self._channel.end()
        self._title.show_idle()

    # --- claim ------------------------------------------------------------------------------------------------------

    def _claim(self, seq: int, permit: Meta) -> Claim | None:
        reported = False

        def report(row: ClaimRow) -> None:
            nonlocal reported
            reported = True
            self._channel.send(encode(Kind.TX_CLAIMED, seq, row._asdict()))

        try:
            claim = self._database.claim(permit.get("time_limit_ms"), report)
            if claim is None:
                self._say(Kind.TX_EMPTY, seq, {"next_visible_s": self._database.next_visible_s()})
        except psycopg.Error as error:
            self._database.close()
            self._ended(seq, self._reason(error), claimed=reported)
            return None
        return claim

    # --- handler ----------------------------------------------------------------------------------------------------

    def _work(self, seq: int, claim: Claim, permit: Meta) -> None:
        ids = {"msg_id": claim.row.msg_id, "read_ct": claim.row.read_ct}
        syncpoints.hit("child.tx.after_claim", ids)
        message = self._message(seq, claim, permit)
        self._title.show_message(message.id, message.attempt)
        self._channel.send(encode(Kind.STARTED, seq))
        syncpoints.hit("child.handler.before", ids)
        outbox = Outbox()
        outcome = self._call(message, outbox)
        syncpoints.hit("child.handler.after", ids)
        calm_signals()
        self._abandoned.end()
        flush_output()
        self._finish(seq, claim.row, outcome or {"kind": "success"}, outbox)

    def _message(self, seq: int, claim: Claim, permit: Meta) -> Message:
        row = claim.row
        attempt = count_attempt(
            read_ct=row.read_ct,
            accounts=row.accounts,
            queue=self._queue,
            msg_id=row.msg_id,
            owed=permit.get("owed") or (),
        )
        limit = permit.get("time_limit_ms")
        head = DispatchHead(row.msg_id, attempt, row.read_ct, row.enqueued_us, -1 if limit is None else limit, 0)
        return Message(self._channel, seq, self._queue, head, claim.headers, claim.body)

    def _call(self, message: Message, outbox: Outbox) -> Meta | None:
        tx: Transaction | AsyncTransaction
        if self._is_async:
            tx = AsyncTransaction(self._database.open_twin(), outbox)
        else:
            tx = Transaction(self._database.held(), outbox)
        try:
            return self._caller.call(message, tx)
        finally:
            tx.end()

    # --- commit -----------------------------------------------------------------------------------------------------

    def _finish(self, seq: int, claim: ClaimRow, outcome: Meta, outbox: Outbox) -> None:
        ids = {"msg_id": claim.msg_id, "read_ct": claim.read_ct}
        try:
            outcome = self._checked(claim, outcome)
        except (Fault, psycopg.Error) as error:
            self._database.close()
            self._ended(seq, _more_telling(self._reason(error), outcome), claimed=True)
            return
        syncpoints.hit("child.tx.before_commit_request", ids)
        self._channel.send(fit_result(Kind.COMMIT_REQUEST, seq, outcome))
        verdict = self._await_verdict(seq)
        if verdict["verdict"] == "refuse":
            self._database.roll_back()
            self._ended(seq, None, claimed=True)
            return
        try:
            self._carry_out(claim, verdict, outbox)
            syncpoints.hit("child.tx.before_commit", ids)
            self._database.commit()
        except CommitInDoubt as error:
            self._database.close()
            self._ended(seq, failure("ConnectionLost", str(error)), claimed=True, in_doubt=True)
            return
        except (Fault, psycopg.Error) as error:
            self._database.roll_back()
            self._ended(seq, self._reason(error), claimed=True)
            return
        syncpoints.hit("child.tx.after_commit", ids)
        self._channel.send(encode(Kind.COMMITTED, seq))

    def _checked(self, claim: ClaimRow, outcome: Meta) -> Meta:
        """The outcome, or the failure that a success hid. Raises `Fault` where no commit can be asked for."""
        if outcome["kind"] != "success":
            self._database.check(claim, undo=True)
            return outcome
        try:
            self._database.check(claim, undo=False)
        except Fault as fault:
            if not fault.mendable:
                raise
            self._database.check(claim, undo=True)
            return failure(fault.kind, fault.text)
        return outcome

    def _await_verdict(self, seq: int) -> Meta:
        while True:
            frame = self._channel.receive()
            if isinstance(frame, Work) or frame.kind not in {Kind.VERDICT, Kind.STOP}:
                raise ProtocolError("something else than a verdict")
            if frame.kind is Kind.VERDICT and frame.seq == seq and isinstance(frame.meta.get("verdict"), str):
                return frame.meta

    def _carry_out(self, claim: ClaimRow, verdict: Meta, outbox: Outbox) -> None:
        match verdict["verdict"]:
            case "ack":
                self._database.acknowledge(claim, verdict["mode"], outbox)
            case "retry":
                self._database.retry(
                    claim,
                    delay_ms=verdict["delay_ms"],
                    accounts=verdict.get("accounts"),
                    read_ct=verdict.get("read_ct"),
                )
            case "dead_letter":
                self._database.dead_letter(claim, queue=verdict["queue"], envelope=verdict["envelope"])
            case other:
                raise ProtocolError(f"unknown verdict {other!r}")

    def _reason(self, error: Fault | psycopg.Error) -> Meta:
        return _found(error, self._database.last_words)

    # --- words ------------------------------------------------------------------------------------------------------

    def _say(self, kind: Kind, seq: int, meta: Meta) -> None:
        self._channel.send(encode(kind, seq, meta))

    def _ended(self, seq: int, why: Meta | None, *, claimed: bool, in_doubt: bool = False) -> None:
        meta: Meta = {"error": None, "sqlstate": None, "in_doubt": in_doubt, "claimed": claimed}
        if why is not None:
            meta["error"], meta["sqlstate"] = why.get("error"), why.get("sqlstate")
        self._channel.send(fit_result(Kind.TX_ENDED, seq, meta))


def _found(error: Fault | psycopg.Error, last_words: LastWords | None) -> Meta:
    """An error that is not the handler's: of the transaction, or of the database."""
    if isinstance(error, Fault):
        meta = failure(error.kind, error.text)
    else:
        fields = describe(error, without_our_frames(error))
        meta = {"kind": "error", "error": fields, "sqlstate": find_sqlstate(error)}
    if last_words is not None and meta.get("sqlstate") is None:
        meta["sqlstate"] = last_words.sqlstate
        meta["error"]["message"] = clean_text(f"{last_words.text}: {meta['error']['message']}")
    return meta


def _more_telling(found: Meta, outcome: Meta) -> Meta:
    """What the handler raised when its connection broke says more than that it is broken."""
    raised = outcome.get("error")
    if raised is None:
        return found
    if found["error"]["type"] in _ENDED_BY_HANDLER:
        found["error"]["traceback"] = raised["traceback"]
        return found
    return {**outcome, "sqlstate": outcome.get("sqlstate") or found.get("sqlstate")}


def _is_async(handler: Callable[..., Any]) -> bool:
    try:
        return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - the method, not whether there is one
    except Exception:  # noqa: BLE001 - a hostile callable
        return False

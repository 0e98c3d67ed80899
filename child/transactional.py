"""Transactional mode: the child owns the transaction, the parent owns the decisions to claim and to commit.

    PERMIT ──▶ claim ──▶ TX_CLAIMED, STARTED ──▶ handler ──▶ COMMIT_REQUEST ──▶ VERDICT ──▶ ack, COMMIT ──▶ COMMITTED
                 │                                  │                              │            │
                 ├──▶ TX_EMPTY                      └──────────────── TX_ENDED ◀───┴────────────┘

The acknowledgement goes through only in the transaction of the claim, on the row as the claim left it. Everything else
is TX_ENDED: the parent then looks at the row, which is the proof of what happened (failure model: attempt ends without
a commit).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

from child.abandoned import Abandoned
from child.attempts import Tally, tally
from child.caller import Caller
from child.channel import Channel
from child.database import Claim, ClaimRow, CommitInDoubt, Database, Fault, LastWords, Unreadable
from child.farewell import flush_output
from child.message import Message
from child.outcomes import Meta, describe, failure, find_sqlstate, without_our_frames
from child.process import calm_signals
from child.results import fit_result
from child.transaction import AsyncTransaction, Outbox, Transaction
from shared import syncpoints
from shared.text import clean_text
from shared.wire.frames import Dispatched, Frame, Kind, ProtocolError, encode

if TYPE_CHECKING:
    from child.title import Title

_NO_LIMIT: Final = 1 << 62
_DEFAULT_TIMEOUT_MS: Final = 30_000
_DEFAULT_LEASE_MS: Final = 30_000
_VERDICT_S: Final = 30.0
_LIMIT_SLACK_MS: Final = 1_000  # the parent's clock is asked first: it keeps the stack and names the cause
_ENDED_BY_HANDLER: Final = frozenset({"TransactionEndedByHandler", "ConnectionLeftBusy"})


def make_step(
    channel: Channel, handler: Callable[..., Any], title: Title, hello: dict[str, Any]
) -> Callable[[Frame | Dispatched], None]:
    """The function that serves one PERMIT. Raises `Disconnected` and `ProtocolError`, nothing else."""
    try:
        database = Database(
            dsn=hello["dsn"],
            application_name=hello.get("application_name") or "pgmq-supervisor",
            queue=hello["queue"],
            lease_ms=int(hello.get("visibility_timeout_ms") or _DEFAULT_LEASE_MS),
            own_timeout_ms=int(hello.get("statement_timeout_ms") or _DEFAULT_TIMEOUT_MS),
        )
        most = _Most(int(hello.get("max_attempts") or _NO_LIMIT), int(hello.get("max_deaths") or _NO_LIMIT))
        return _Worker(channel, handler, title, hello["queue"], database, most).serve
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"HELLO lacks or mangles {error}") from error


class _Most(NamedTuple):
    """What a message may have had before it is not run any more."""

    attempts: int
    deaths: int


class _Worker:
    """Serves permits, one after another, over one session."""

    def __init__(
        self,
        channel: Channel,
        handler: Callable[..., Any],
        title: Title,
        queue: str,
        database: Database,
        most: _Most,
    ) -> None:
        self._channel = channel
        self._caller = Caller(handler, channel, with_sqlstate=True)
        self._is_async = _is_async(handler)
        self._title = title
        self._queue = queue
        self._database = database
        self._abandoned = Abandoned(channel)
        self._most = most
        self._unsent = b""  # TX_CLAIMED that goes out with what follows it at once

    def serve(self, frame: Frame | Dispatched) -> None:
        """One permit: from BEGIN to an answer that frees us."""
        if not isinstance(frame, Frame):
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

        def report(row: ClaimRow, waits: bool) -> None:
            nonlocal reported
            reported = True
            self._unsent = encode(Kind.TX_CLAIMED, seq, row._asdict())
            if waits or row.touched:  # a large body may be the end of us: the parent must know whose it was
                self._send()

        limit_ms = permit.get("time_limit_ms")
        try:
            claim = self._database.claim(None if limit_ms is None else limit_ms + _LIMIT_SLACK_MS, report)
            if claim is None:
                self._say(Kind.TX_EMPTY, seq, {"next_visible_s": self._database.next_visible_s()})
        except Unreadable as error:
            self._send()
            if not self._may_go_on(seq, error.row):
                return None
            self._finish(seq, error.row, failure("UnreadableBody", error.text, kind="invalid_message"), Outbox())
            return None
        except psycopg.Error as error:
            self._send()
            self._database.close()
            self._ended(seq, self._reason(error), claimed=reported)
            return None
        return claim if claim is not None and self._may_go_on(seq, claim.row) else None

    def _may_go_on(self, seq: int, row: ClaimRow) -> bool:
        """What somebody had before and gave up may have to be charged first: the parent knows, or will in a moment."""
        if not row.touched:
            return True
        verdict = self._await_verdict(seq)
        if verdict is not None and verdict["verdict"] == "go":
            return True
        if verdict is not None and verdict["verdict"] == "postpone":
            self._postpone(row, verdict["delay_ms"])
        else:
            self._database.roll_back()
        self._ended(seq, None if verdict is not None else _missing(), claimed=True)
        return False

    def _postpone(self, row: ClaimRow, delay_ms: int) -> None:
        """Where the pause cannot be written the next claim finds the message as this one did."""
        try:
            self._database.postpone(row, delay_ms)
        except psycopg.Error:
            self._database.close()

    def _send(self, *frames: bytes) -> None:
        """Send frames after those that wait."""
        data, self._unsent = self._unsent + b"".join(frames), b""
        if data:
            self._channel.send(data)

    # --- handler ----------------------------------------------------------------------------------------------------

    def _work(self, seq: int, claim: Claim, permit: Meta) -> None:
        ids = {"msg_id": claim.row.msg_id, "read_ct": claim.row.read_ct}
        syncpoints.hit("child.tx.after_claim", ids)
        counted = tally(
            read_ct=claim.row.read_ct,
            accounts=claim.row.accounts,
            queue=self._queue,
            msg_id=claim.row.msg_id,
            owed=permit.get("owed") or (),
        )
        message = self._message(seq, claim, permit, counted.attempt)
        outbox = Outbox()
        outcome = self._not_to_be_run(seq, counted)
        if outcome is not None:
            self._send()
            self._finish(seq, claim.row, outcome, outbox)
            return
        self._title.show_message(message.id, message.attempt)
        self._send(encode(Kind.STARTED, seq))
        syncpoints.hit("child.handler.before", ids)
        outcome = self._call(message, outbox)
        syncpoints.hit("child.handler.after", ids)
        self._channel.wary = calm_signals()
        self._abandoned.end()
        flush_output()
        self._finish(seq, claim.row, outcome or {"kind": "success"}, outbox)

    def _not_to_be_run(self, seq: int, counted: Tally) -> Meta | None:
        """An outcome without the handler: it was asked to stop before it began, or it has had all its attempts."""
        if self._channel.stop_reason(seq) is not None:
            return failure("Stopped", "a stop was asked for before the handler began", kind="stopped")
        if counted.attempt > self._most.attempts:  # delivered again and again without a verdict
            return failure("AttemptsExhausted", f"attempt {counted.attempt} of {self._most.attempts}")
        if counted.deaths >= self._most.deaths:  # its dead letter was refused
            return failure("DeathsExhausted", f"{counted.deaths} deaths of {self._most.deaths}")
        return None

    def _message(self, seq: int, claim: Claim, permit: Meta, attempt: int) -> Message:
        row = claim.row
        limit = permit.get("time_limit_ms")
        limit_ms = -1 if limit is None else limit
        claimed = (seq, row.msg_id, attempt, row.read_ct, row.enqueued_us, limit_ms, claim.headers, claim.body)
        return Message(self._channel, self._queue, claimed)

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
            found = self._reason(error)
            self._database.close()
            self._ended(seq, found, claimed=True, outcome=_with_outcome(found, outcome))
            return
        syncpoints.hit("child.tx.before_commit_request", ids)
        self._channel.send(fit_result(Kind.COMMIT_REQUEST, seq, outcome))
        verdict = self._await_verdict(seq)
        if verdict is None:
            self._database.roll_back()
            self._ended(seq, _missing(), claimed=True)
            return
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
        except Fault as fault:
            self._database.close()  # with all that the handler may have done to it
            self._ended(seq, self._reason(fault), claimed=True)
            return
        except psycopg.Error as error:
            found = self._reason(error)
            self._database.roll_back()
            self._ended(seq, found, claimed=True)
            return
        syncpoints.hit("child.tx.after_commit", ids)
        self._channel.send(encode(Kind.COMMITTED, seq))

    def _checked(self, claim: ClaimRow, outcome: Meta) -> Meta:
        """The outcome, or the failure that a success hid. Raises `Fault` where no commit can be asked for."""
        if outcome["kind"] != "success":
            self._database.undo(claim)
            return outcome
        try:
            self._database.check_state()
        except Fault as fault:
            if not fault.mendable:
                raise
            self._database.undo(claim)
            return failure(fault.kind, fault.text)
        return outcome

    def _await_verdict(self, seq: int) -> Meta | None:
        """None: it did not come in time. The parent may stand still, and the transaction must not do so as well."""
        while True:
            try:
                frame = self._channel.receive(_VERDICT_S)
            except TimeoutError:
                return None
            if not isinstance(frame, Frame) or frame.kind not in {Kind.VERDICT, Kind.STOP}:
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

    def _ended(
        self, seq: int, why: Meta | None, *, claimed: bool, in_doubt: bool = False, outcome: Meta | None = None
    ) -> None:
        meta: Meta = {"error": None, "sqlstate": None, "in_doubt": in_doubt, "claimed": claimed}
        if why is not None:
            meta["error"], meta["sqlstate"] = why.get("error"), why.get("sqlstate")
        if outcome is not None:
            meta |= outcome
        self._channel.send(fit_result(Kind.TX_ENDED, seq, meta))


def _missing() -> Meta:
    return failure("VerdictMissing", f"no verdict within {_VERDICT_S:g} s")


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


def _with_outcome(found: Meta, outcome: Meta) -> Meta | None:
    """What the handler asked for although its transaction is gone; None for a success, which needs one.

    What it raised when its connection broke says more than that it is broken; that it ended the transaction itself
    says more than what it raised then, unless that is a verdict.
    """
    if outcome["kind"] == "success":
        return None
    raised = outcome.get("error")
    if outcome["kind"] == "error" and not outcome.get("permanent") and found["error"]["type"] in _ENDED_BY_HANDLER:
        error = {**found["error"], "traceback": raised["traceback"] if raised else ""}
        return {"kind": "error", "error": error, "sqlstate": None}
    return {**outcome, "sqlstate": outcome.get("sqlstate") or found.get("sqlstate")}


def _is_async(handler: Callable[..., Any]) -> bool:
    try:
        return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - the method, not whether there is one
    except Exception:  # noqa: BLE001 - a hostile callable
        return False

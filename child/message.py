"""What a handler is given: one message, with what it may ask and say about it. Everything costly is done on demand."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from child.body import decode_json
from child.limits import Allowance
from child.logs import logger_for
from child.verdicts import Abandon, DeadLetter, ImpossibleDelay, InvalidMessage, Retry, Stopped
from shared.clock import boottime
from shared.durations import parse_delay_ms
from shared.errors import ValidationError
from shared.text import clean_text
from shared.wire.frames import Dispatched, Kind

if TYPE_CHECKING:
    import logging

    from child.channel import Channel

OUR_HEADER: Final = "x-supervisor"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROGRESS_BYTES: Final = 1024
_PROGRESS_BURST: Final = 10
_PROGRESS_PER_S: Final = 10.0
_UNREAD: Final[Any] = object()


class Message:
    """One delivery of one message. Usable from any thread while the handler runs; afterwards it reports a stop."""

    __slots__ = (
        "_ack",
        "_body",
        "_channel",
        "_enqueued_us",
        "_headers",
        "_headers_text",
        "_is_null",
        "_log",
        "_progress",
        "_run_until",
        "_seq",
        "attempt",
        "deliveries",
        "id",
        "queue",
        "raw",
    )

    def __init__(self, channel: Channel, queue: str, dispatched: Dispatched) -> None:
        self._channel = channel
        self.queue = queue
        (
            self._seq,
            self.id,
            self.attempt,
            self.deliveries,
            self._enqueued_us,
            limit_ms,
            self._headers_text,
            body,
        ) = dispatched
        self._run_until = None if limit_ms < 0 else boottime() + limit_ms / 1000
        self.raw = b"" if body is None else body
        self._is_null = body is None
        self._headers: dict[str, Any] | None = None
        self._body: Any = _UNREAD
        self._log: logging.Logger | None = None
        self._progress: Allowance | None = None
        self._ack: str | None = None

    def __repr__(self) -> str:
        """For logs and debuggers."""
        return f"<message {self.id} of queue {self.queue}, attempt {self.attempt}>"

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def body(self) -> Any:
        """The decoded body. Raises `InvalidMessage` for SQL NULL and for what cannot be decoded; `raw` still works."""
        if self._body is _UNREAD:
            if self._is_null:
                raise InvalidMessage("the body is SQL NULL")
            self._body = decode_json(self.raw)
        return self._body

    @property
    def headers(self) -> dict[str, Any]:
        """The headers without our own entry. Headers that are no JSON object count as empty."""
        if self._headers is None:
            self._headers = _decode_headers(self._headers_text)
        return self._headers

    @property
    def enqueued_at(self) -> datetime:
        """When it was sent, by the database's clock."""
        try:
            return _EPOCH + timedelta(microseconds=self._enqueued_us)
        except OverflowError:
            return datetime.max.replace(tzinfo=UTC) if self._enqueued_us > 0 else datetime.min.replace(tzinfo=UTC)

    def time_left(self) -> float | None:
        """Seconds until hard_timeout, never below 0; None without a limit."""
        return None if self._run_until is None else max(0.0, self._run_until - boottime())

    # --- being stopped ----------------------------------------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        """Whether the handler should come to an end: soft timeout, shutdown, cancel, or a lost lease."""
        return self._channel.stop_reason(self._seq) is not None

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` when a stop was asked for. Let it go through: it says that the work is unfinished."""
        reason = self._channel.stop_reason(self._seq)
        if reason is not None:
            raise Stopped(reason)

    # --- telling about it -------------------------------------------------------------------------------------------

    def progress(self, text: object) -> None:
        """Say how far it is, for status and the live page. What comes faster than ten a second is skipped."""
        if self._progress is None:
            self._progress = Allowance(burst=_PROGRESS_BURST, per_s=_PROGRESS_PER_S, now=time.monotonic())
        if self._progress.take(time.monotonic()):
            self._channel.say(Kind.PROGRESS, self._seq, {"text": clean_text(text, _PROGRESS_BYTES)})

    @property
    def log(self) -> logging.Logger:
        """A logger whose records appear in the supervisor's log with queue and message. Bounded in size and rate."""
        if self._log is None:
            self._log = logger_for(self._channel, self._seq, self.queue)
        return self._log

    # --- how it ends ------------------------------------------------------------------------------------------------

    def retry(self, after: float | str | timedelta | None = None) -> Retry:
        """Return or raise it: again after exactly `after` (seconds, timedelta, text; None: by the queue's policy).

        Raises `ImpossibleDelay`, which is permanent, for what is negative, not finite, or too long.
        """
        if after is None:
            return Retry({"kind": "retry"}, "retry")
        return Retry({"kind": "retry", "delay_ms": checked_delay_ms(after)}, f"retry after {after}")

    def dead_letter(self, reason: object = "") -> DeadLetter:
        """Return or raise it: to the dead-letter queue, reason `rejected`, with this text."""
        text = clean_text(reason)
        return DeadLetter({"kind": "reject", "reason": text}, f"dead letter: {text}")

    def abandon(self) -> Abandon:
        """Return or raise it: leave the message alone until its visibility timeout ends."""
        return Abandon({"kind": "abandon"}, "abandon")

    def archive(self) -> None:
        """On success archive the message, whatever the queue's on_success says."""
        self._ack = "archive"

    def delete(self) -> None:
        """On success delete the message, whatever the queue's on_success says."""
        self._ack = "delete"


def checked_delay_ms(delay: float | str | timedelta) -> int:
    """Whole milliseconds. Raises `ImpossibleDelay` (failure model: delay negative or too large)."""
    try:
        return parse_delay_ms(delay)
    except ValidationError as error:
        raise ImpossibleDelay(str(error)) from None


def _decode_headers(text: bytes) -> dict[str, Any]:
    if not text:
        return {}
    try:
        headers = decode_json(text)
    except InvalidMessage:
        return {}
    if not isinstance(headers, dict):
        return {}
    headers.pop(OUR_HEADER, None)
    return headers

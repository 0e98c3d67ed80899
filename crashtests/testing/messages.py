"""A message as a handler meets it, made by hand: no queue, no process. Its public face is that of the real one."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from shared.durations import parse_delay_ms
from shared.errors import ValidationError

__all__ = ["ImpossibleDelay", "InvalidMessage", "Message", "Stopped", "Verdict"]

Delay = float | str | timedelta


class Verdict(Exception):
    """Made by `message.retry()`, `dead_letter()` or `abandon()`; says something only when returned or raised."""

    def __init__(self, kind: str, *, delay_s: float | None = None, reason: str = "") -> None:
        """Keep what was asked for."""
        super().__init__(f"{kind} {reason}".strip())
        self.kind = kind
        self.delay_s = delay_s
        self.reason = reason


class Stopped(Exception):
    """`message.raise_if_stopped()` was called after a stop had been asked for."""


class InvalidMessage(ValueError):
    """The body is SQL NULL or cannot be decoded."""


class ImpossibleDelay(ValueError):
    """A delay that PGMQ cannot take."""

    permanent = True


class Message:
    """One delivery of one message. `progress_texts` keeps what the handler said of its progress."""

    def __init__(
        self,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, Any] | None = None,
        id: int = 1,  # noqa: A002 - the name that it has for handlers
        queue: str = "test",
        attempt: int = 1,
        deliveries: int | None = None,
        enqueued_at: datetime | None = None,
        time_left_s: float | None = None,
        stop_requested: bool = False,
    ) -> None:
        """`body` is what JSON can say; `raw` replaces it, also with what JSON cannot."""
        self.id = id
        self.queue = queue
        self.raw = json.dumps(body).encode() if raw is None else raw
        self.headers = dict(headers or {})
        self.attempt = attempt
        self.deliveries = attempt if deliveries is None else deliveries
        self.enqueued_at = enqueued_at or datetime.now(UTC)
        self.stop_requested = stop_requested
        self.progress_texts: list[str] = []
        self.ack: str | None = None
        self._time_left_s = time_left_s

    @property
    def body(self) -> Any:
        """The decoded body. Raises `InvalidMessage`."""
        try:
            return json.loads(self.raw)
        except ValueError as error:
            raise InvalidMessage(f"the body cannot be decoded: {error}") from None

    @property
    def log(self) -> logging.Logger:
        """An ordinary logger: caplog sees it."""
        return logging.getLogger(f"pgmq_supervisor.{self.queue}")

    def time_left(self) -> float | None:
        """Seconds to hard_timeout, as given; None: no limit."""
        return self._time_left_s

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` when a stop was asked for."""
        if self.stop_requested:
            raise Stopped("stop requested")

    def progress(self, text: object) -> None:
        """Keep it."""
        self.progress_texts.append(str(text))

    def retry(self, after: Delay | None = None) -> Verdict:
        """Again, after exactly this or by policy. Raises `ImpossibleDelay`."""
        return Verdict("retry", delay_s=None if after is None else checked_delay_s(after))

    def dead_letter(self, reason: object = "") -> Verdict:
        """Never again."""
        return Verdict("dead_letter", reason=str(reason))

    def abandon(self) -> Verdict:
        """Leave it alone."""
        return Verdict("abandon")

    def archive(self) -> None:
        """On success archive it."""
        self.ack = "archive"

    def delete(self) -> None:
        """On success delete it."""
        self.ack = "delete"


def checked_delay_s(delay: Delay) -> float:
    """Seconds. Raises `ImpossibleDelay`."""
    try:
        return parse_delay_ms(delay) / 1000
    except ValidationError as error:
        raise ImpossibleDelay(str(error)) from None

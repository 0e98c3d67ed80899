"""What a handler may return or raise to say how its message ends, and the errors that mean something to us."""

from __future__ import annotations

from typing import Any

__all__ = ["Abandon", "DeadLetter", "ImpossibleDelay", "InvalidMessage", "Retry", "Stopped", "Verdict"]


class Verdict(Exception):
    """Made by `message.retry()`, `dead_letter()` or `abandon()`. Without being returned or raised it says nothing."""

    def __init__(self, meta: dict[str, Any], text: str) -> None:
        super().__init__(text)
        self.meta = meta


class Retry(Verdict):
    """Again, after a delay."""


class DeadLetter(Verdict):
    """Never again: into the dead-letter queue, reason `rejected`."""


class Abandon(Verdict):
    """No settlement: the message comes back by itself."""


class Stopped(Exception):
    """`message.raise_if_stopped()` was called after a stop had been asked for."""


class InvalidMessage(ValueError):
    """The body is SQL NULL or cannot be decoded. Uncaught: dead letter `invalid_message`."""


class ImpossibleDelay(ValueError):
    """A delay that PGMQ cannot take. Refused before any SQL; uncaught: dead letter `failed`."""

    permanent = True

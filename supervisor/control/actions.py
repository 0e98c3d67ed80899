"""What can be asked of a running supervisor. HTTP and the control socket only translate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

Result = Mapping[str, object]


class Refusal(StrEnum):
    """Why an action was not carried out."""

    UNKNOWN = "unknown"  # no such queue, or no such message in it
    INVALID = "invalid"  # the request makes no sense
    CONFLICT = "conflict"  # not now: it is shutting down, or that message is not running
    FAILED = "failed"  # tried, and it did not work: the database is away


class ActionError(Exception):
    """An action that was refused, with a reason for people."""

    def __init__(self, refusal: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refusal = refusal
        self.reason = reason


class Actions(Protocol):
    """Implemented by the composition root. Results are plain values; failures are `ActionError`."""

    async def pause(self, queue: str) -> Result:
        """Stop claiming from a queue, for every supervisor of it: {"queue", "paused", "persisted", "note"}.

        `persisted` is False where the row could not be written; then the pause is local and `note` says why.
        """

    async def resume(self, queue: str) -> Result:
        """Undo `pause`, likewise."""

    async def cancel(self, queue: str, msg_id: int) -> Result:
        """Cancel a message that this supervisor holds: stop request, then kill; dead letter `cancelled`."""

    async def redrive(self, queue: str, msg_ids: Sequence[int] | None, rate: float | None) -> Result:
        """Move dead letters back to `queue`; None: all. At most `rate` a second.

        {"queue", "redriven", "skipped", "failed", "more", "note"}: numbers, and whether something is left of what was
        asked for, as one answer is not waited for without end.
        """

    async def drain(self) -> Result:
        """Begin an orderly shutdown, as TERM does, and return at once."""

    def status(self) -> Mapping[str, object]:
        """The status document."""

    async def metrics(self, *, openmetrics: bool) -> tuple[bytes, str]:
        """The exposition and its content type."""

    def not_live(self) -> Sequence[str]:
        """Why the loop makes no progress; empty when it does."""

    def not_ready(self) -> Mapping[str, str]:
        """Why queues are not ready, by name, "" for the whole; empty when all are."""

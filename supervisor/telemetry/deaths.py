"""The last deaths of children, for status and top."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from supervisor.core.happenings import ChildEnded
from supervisor.core.types import DeathCause

_KEEP: Final = 50
_TAIL_CHARS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One death."""

    at: float  # seconds since the epoch
    queue: str
    slot: int
    pid: int
    cause: str
    signal: str | None
    exit_code: int | None
    msg_id: int | None
    attempt: int | None
    charged: bool
    max_rss_kb: int
    output_tail: str


class RecentDeaths:
    """A ring buffer. Children that retired are no deaths."""

    def __init__(self, keep: int = _KEEP) -> None:
        self._ring: deque[Death] = deque(maxlen=keep)

    def add(self, happening: ChildEnded, *, at: float) -> None:
        """Remember a death."""
        if happening.cause is DeathCause.RETIRED:
            return
        facts = happening.facts
        self._ring.append(
            Death(
                at=at,
                queue=happening.queue,
                slot=happening.slot,
                pid=happening.pid,
                cause=happening.cause.value,
                signal=facts.signal,
                exit_code=facts.exit_code,
                msg_id=happening.msg_id,
                attempt=happening.attempt,
                charged=happening.charged,
                max_rss_kb=facts.max_rss_kb,
                output_tail=facts.output_tail[-_TAIL_CHARS:],
            )
        )

    def latest(self) -> list[Death]:
        """Return what is remembered, the latest first."""
        return list(reversed(self._ring))

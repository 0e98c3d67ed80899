"""A finding: what was looked at, how it stands, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Level", "fail", "ok", "warning"]


class Level(StrEnum):
    """How it stands."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of `check`."""

    level: Level
    subject: str
    text: str
    remedy: str | None = None

    def fields(self) -> dict[str, str | None]:
        """The same as plain values, for JSON."""
        return {"level": self.level.value, "subject": self.subject, "text": self.text, "remedy": self.remedy}


def ok(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """It works, and is probably not meant so."""
    return Finding(Level.WARN, subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    """It cannot work."""
    return Finding(Level.FAIL, subject, text, remedy)

"""What can be wrong with a configuration: where it stands, which key, which value, why, and what to do."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.errors import ConfigurationError

__all__ = ["InvalidConfiguration", "Path", "Problem", "did_you_mean", "dotted", "redact_dsn", "shown"]

Path = tuple[str, ...]

_SECRET_KEYS = frozenset({"token"})
_DSN_KEYS = frozenset({"dsn", "listen_dsn"})
_URL_PASSWORD = re.compile(r"(://[^:/@?\s]*:)[^@\s]*@")
_KEY_PASSWORD = re.compile(r"(\b(?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_MAX_SHOWN = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that must be changed (or, as a warning, should be)."""

    where: str  # a file's name, the name of an environment variable, or a flag
    key: str  # dotted; empty where the whole source is meant
    value: str | None  # as it would stand in the file, secrets hidden; None: there is none
    reason: str
    remedy: str

    def __str__(self) -> str:
        """Three lines for people: place, reason, remedy."""
        place = self.where
        if self.key:
            place += f": {self.key}" + ("" if self.value is None else f" = {self.value}")
        elif self.value is not None:
            place += f" {self.value}"
        return f"{place}\n    {self.reason}\n    remedy: {self.remedy}"

    def fields(self) -> dict[str, str | None]:
        """The same as plain values, for JSON."""
        return {
            "where": self.where,
            "key": self.key or None,
            "value": self.value,
            "reason": self.reason,
            "remedy": self.remedy,
        }


class InvalidConfiguration(ConfigurationError):
    """The configuration cannot work. Has every problem, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Keep the problems; the message is their list."""
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "\n".join(str(problem) for problem in self.problems)
        super().__init__(f"configuration: {count}, nothing was started\n{lines}")


def dotted(path: Path) -> str:
    """Write a path as TOML would: `queues.orders.retry.base`."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in path)


def shown(path: Path, value: object) -> str:
    """Write a value as it would stand in the file: one line, bounded, secrets hidden."""
    if path and path[-1] in _SECRET_KEYS:
        return '"***"'
    if isinstance(value, str):
        text = json.dumps(redact_dsn(value) if path and path[-1] in _DSN_KEYS else str(value))
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, dict):
        text = "{ ... }" if value else "{}"
    elif isinstance(value, list):
        text = "[ ... ]" if value else "[]"
    elif isinstance(value, int) and value.bit_length() > 400:
        text = "<huge integer>"
    else:
        text = str(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def redact_dsn(dsn: str) -> str:
    """Hide the password of a connection string, in either of its notations."""
    return _KEY_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", dsn))


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that this one was probably meant to be."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return close[0] if close else None

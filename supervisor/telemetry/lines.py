"""How one log entry looks: key=value on a terminal, JSON elsewhere. No value can break the line."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Final

from supervisor.telemetry.catalogue import Level
from supervisor.telemetry.records import Record

# Shown below the line, indented, because they have lines of their own.
BLOCKS: Final = ("traceback", "stack", "output_tail")

_BLOCK_LINES: Final = 30
_BLOCK_CHARS: Final = 6_000
_VALUE_CHARS: Final = 1_000
_JSON_CHARS: Final = 32_768
_PLAIN: Final = re.compile(r"[^\s\"'=\\\x00-\x20\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
# What a terminal would obey instead of show: C0 without tab, DEL, C1, separators of lines, directional overrides.
_UNSHOWABLE: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# The part of it that JSON lets through. Readers that know Unicode would end the line there.
_NOT_IN_JSON: Final = re.compile(r"[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def showable(text: str) -> str:
    """Escape what would move the cursor, change colours or forge a line."""
    return _UNSHOWABLE.sub(_escape, text)


def cut(text: str, limit: int) -> str:
    """Shorten a text and say how much is missing."""
    return text if len(text) <= limit else f"{text[:limit]} ... [{len(text) - limit} characters cut]"


def json_line(*, at: float, level: Level, event: str, text: str, fields: Record) -> bytes:
    """Write one entry as a JSON object in one line."""
    record: Record = {"time": _utc(at), "level": level.name.lower(), "event": event}
    if text:
        record["message"] = text
    for name, value in fields.items():
        record[name] = cut(value, _JSON_CHARS) if isinstance(value, str) else value
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=True)
    return _encoded(_NOT_IN_JSON.sub(_escape, line))


def console_line(*, at: float, level: Level, event: str, text: str, fields: Record) -> bytes:
    """Write one entry for people: time, level, event, sentence, key=value; long texts below it."""
    moment = datetime.fromtimestamp(at, tz=UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    parts = [moment, f"{level.name:<7}", event]
    if text:
        parts.append(showable(text))
    parts.extend(f"{name}={_shown(value)}" for name, value in fields.items() if name not in BLOCKS)
    lines = [" ".join(parts)]
    for name in BLOCKS:
        value = fields.get(name)
        if isinstance(value, str) and value.strip():
            lines.append(f"    {name}:")
            lines.extend(f"    | {line}" for line in _block(value, keep_end=name != "stack"))
    return _encoded("\n".join(lines))


def _encoded(line: str) -> bytes:
    return line.encode("utf-8", errors="replace") + b"\n"


def _shown(value: object) -> str:
    """Write a value so that its end can be seen."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = cut(str(value), _VALUE_CHARS)
    if _PLAIN.fullmatch(text):
        return text
    return showable(json.dumps(text, ensure_ascii=False))


def _block(text: str, *, keep_end: bool) -> list[str]:
    """Cut a text of several lines: a traceback and an output say most at their end, a stack at its start."""
    text = text[-_BLOCK_CHARS:] if keep_end else text[:_BLOCK_CHARS]
    lines = [showable(line) for line in text.rstrip().split("\n")]
    if len(lines) <= _BLOCK_LINES:
        return lines
    missing = f"... [{len(lines) - _BLOCK_LINES} lines cut]"
    return [missing, *lines[-_BLOCK_LINES:]] if keep_end else [*lines[:_BLOCK_LINES], missing]


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

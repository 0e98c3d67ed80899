"""The log sink: which happenings become lines, how often, and in which form."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, Protocol

from shared.clock import boottime
from supervisor.core import happenings as h
from supervisor.telemetry.catalogue import CATALOGUE, RANGING, Level, level_of, parse_level
from supervisor.telemetry.facts import AnyHappening, Noted
from supervisor.telemetry.lines import console_line, cut, json_line
from supervisor.telemetry.ratelimit import Rate, RateLimiter
from supervisor.telemetry.records import Record, event_name, fields_of

_RATE: Final = Rate(burst=50, per_s=5)  # of one event of one queue
# What an outage makes every message say again and again: the first few say it all.
_OUTAGE_RATE: Final = Rate(burst=5, per_s=0.2)
_RATES: Final[dict[type, Rate]] = {h.SettlementFailed: _OUTAGE_RATE, h.LeaseRenewalFailed: _OUTAGE_RATE}
_OUTPUT_RATE: Final = Rate(burst=500, per_s=100)  # of what the children of one queue print
_OUTPUT_CHARS: Final = 8_192
_SUMMARY_EVERY_S: Final = 10.0


class Writer(Protocol):
    """Where lines go."""

    def write(self, line: bytes) -> None:
        """Take a line that ends in a newline."""


class LogSink:
    """Turn happenings, children's output and notes into lines."""

    def __init__(
        self,
        writer: Writer,
        *,
        console: bool,
        level: str = "info",
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = boottime,
    ) -> None:
        """`console`: key=value lines for people, else JSON. `level`: "debug", "info", "warning" or "error"."""
        self._writer = writer
        self._format = console_line if console else json_line
        self._level = parse_level(level)
        self._wall = wall
        self._clock = clock
        self._limiter = RateLimiter()
        self._summary_at = clock() + _SUMMARY_EVERY_S

    def wants(self, kind: type) -> bool:
        """Say whether happenings of this type can be visible at all: what cannot is never routed here."""
        entry = CATALOGUE.get(kind)
        if entry is None:
            return False
        return entry.level >= self._level or kind in RANGING

    def happened(self, happening: AnyHappening) -> None:
        """Log one happening, unless its level or its rate forbids it."""
        level = level_of(happening)
        if level < self._level:
            return
        event = event_name(happening)
        rate = _RATES.get(type(happening), _RATE)
        suppressed = self._limiter.admit((event, str(getattr(happening, "queue", ""))), rate, self._clock())
        if suppressed is None:
            return  # before its fields were even looked at: a storm is cheap
        text = happening.text if isinstance(happening, Noted) else CATALOGUE[type(happening)].text
        self._write(level, event, text, _with(fields_of(happening), suppressed))

    def output(
        self, text: str, *, queue: str, slot: int, pid: int | None, msg_id: int | None, attempt: int | None
    ) -> None:
        """Log one line that a child printed, with the message that it worked on."""
        if self._level > Level.INFO:
            return
        fields = _identity(queue, slot, pid, msg_id, attempt)
        fields["line"] = cut(text, _OUTPUT_CHARS)
        self._limited(Level.INFO, "child.output", "", fields, _OUTPUT_RATE)

    def child_log(
        self,
        level: str,
        text: str,
        *,
        queue: str,
        slot: int,
        pid: int | None,
        msg_id: int | None,
        attempt: int | None,
    ) -> None:
        """Log what a handler wrote with `message.log`."""
        rank = parse_level(level)
        if rank < self._level:
            return
        fields = _identity(queue, slot, pid, msg_id, attempt)
        self._limited(rank, "child.log", cut(text, _OUTPUT_CHARS), fields, _OUTPUT_RATE)

    def entry(self, event: str, text: str, *, level: Level = Level.INFO, fields: Record | None = None) -> None:
        """Log something that happens seldom, whatever its rate."""
        if level >= self._level:
            self._write(level, event, text, fields or {})

    def library(self, logger: str, level: Level, text: str, traceback: str | None) -> None:
        """Log what a library said through the standard library's logging."""
        if level < self._level:
            return
        fields: Record = {"logger": logger}
        if traceback:
            fields["traceback"] = traceback
        self._limited(level, "library", cut(text, _OUTPUT_CHARS), fields)

    def tick(self, *, final: bool = False) -> None:
        """Say from time to time what was held back, also when no further line comes."""
        now = self._clock()
        if now < self._summary_at and not final:
            return
        self._summary_at = now + _SUMMARY_EVERY_S
        for event, queue, count in self._limiter.take_suppressed():
            fields: Record = {"suppressed_event": event, "queue": queue, "count": count}
            self._write(Level.WARNING, "log.suppressed", "lines were held back", fields)

    def _limited(self, level: Level, event: str, text: str, fields: Record, rate: Rate = _RATE) -> None:
        suppressed = self._limiter.admit((event, str(fields.get("queue", ""))), rate, self._clock())
        if suppressed is not None:
            self._write(level, event, text, _with(fields, suppressed))

    def _write(self, level: Level, event: str, text: str, fields: Record) -> None:
        self._writer.write(self._format(at=self._wall(), level=level, event=event, text=text, fields=fields))


def _with(fields: Record, suppressed: int) -> Record:
    """Say how many entries were held back before this one."""
    if suppressed:
        fields["suppressed"] = suppressed
    return fields


def _identity(queue: str, slot: int, pid: int | None, msg_id: int | None, attempt: int | None) -> Record:
    fields: Record = {"queue": queue, "slot": slot}
    for name, value in (("pid", pid), ("msg_id", msg_id), ("attempt", attempt)):
        if value is not None:
            fields[name] = value
    return fields


def wants_console(log_format: str, fd: int) -> bool:
    """Resolve `[log] format`: "auto" means console on a terminal, JSON elsewhere."""
    if log_format == "auto":
        try:
            return os.isatty(fd)
        except OSError:
            return False
    return log_format == "console"

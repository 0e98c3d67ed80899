"""From what a caller gives to a connection: libpq's parameters pass through, ours fill the gaps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import conninfo

from shared.durations import parse_duration, parse_optional_duration
from shared.errors import ValidationError
from shared.pgmq.arguments import Duration
from shared.pgmq.libpq import KEEPALIVE, with_settings

__all__ = ["Settings", "settings"]

_MAX_POOL: Final = 1000
# The server should be the first to give up, so that the connection lives on.
_SLACK_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a client works with. Times in seconds; None: no limit."""

    given: Mapping[str, str]  # libpq's parameters as the caller wrote them
    pool_size: int
    acquire_timeout_s: float
    connect_timeout_s: float
    statement_timeout_s: float | None
    application_name: str

    @property
    def answer_timeout_s(self) -> float | None:
        """How long to wait for an answer before the connection is given up."""
        return None if self.statement_timeout_s is None else self.statement_timeout_s + _SLACK_S

    def conninfo(self, *, plain: bool) -> str:
        """Merge the caller's parameters with ours; theirs win, but for the encoding. `plain`: as poolers want it.

        A service file speaks for itself: what it does not say, libpq's own defaults say.
        """
        ours: dict[str, str] = {}
        if "service" not in self.given and "PGSERVICE" not in os.environ:
            ours = dict(KEEPALIVE)
            if "PGAPPNAME" not in os.environ:
                ours["application_name"] = self.application_name
            if "PGCONNECT_TIMEOUT" not in os.environ:
                ours["connect_timeout"] = str(max(2, round(self.connect_timeout_s)))
        parameters = {**ours, **self.given, "client_encoding": "utf8"}
        if not plain and self.statement_timeout_s is not None:
            limit_ms = max(1, round(self.statement_timeout_s * 1000))
            parameters["options"] = with_settings({"statement_timeout": limit_ms}, self.given.get("options"))
        return conninfo.make_conninfo("", **parameters)


def settings(
    dsn: str,
    libpq: Mapping[str, Any],
    *,
    pool_size: object,
    acquire_timeout: Duration,
    connect_timeout: Duration,
    statement_timeout: Duration | None,
    application_name: str,
) -> Settings:
    """Check what a caller gives. Raises `ValidationError`, which never repeats the DSN: it may hold a password."""
    if isinstance(pool_size, bool) or not isinstance(pool_size, int) or not 1 <= pool_size <= _MAX_POOL:
        raise ValidationError(f"pool_size {pool_size!r:.40} is not a number from 1 to {_MAX_POOL}")
    statement_timeout_s = parse_optional_duration(statement_timeout)
    if statement_timeout_s == 0:
        raise ValidationError("statement_timeout is zero", remedy='say "none" for no limit')
    return Settings(
        given=_parse(dsn, libpq),
        pool_size=pool_size,
        acquire_timeout_s=parse_duration(acquire_timeout),
        connect_timeout_s=parse_duration(connect_timeout),
        statement_timeout_s=statement_timeout_s,
        application_name=application_name,
    )


def _parse(dsn: str, libpq: Mapping[str, Any]) -> dict[str, str]:
    unknown = sorted(set(libpq) - _known_parameters())
    if unknown:
        raise ValidationError(f"libpq has no parameter {', '.join(unknown)}", operation="connect")
    try:
        found = conninfo.conninfo_to_dict(dsn, **libpq)
    except psycopg.Error as error:
        raise ValidationError(
            "the DSN cannot be read", operation="connect", remedy="postgresql://user:password@host:5432/database"
        ) from error.with_traceback(None)
    return {key: str(value) for key, value in found.items() if value is not None}


def _known_parameters() -> set[str]:
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}

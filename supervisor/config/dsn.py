"""Connection strings: whether one can be read at all, before anything is tried with it."""

from __future__ import annotations

import re

__all__ = ["dsn_refusal", "is_embedded"]

_EMBEDDED = re.compile(r"embedded(:.*)?", re.DOTALL)
_OTHER_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_REMEDY = 'write "postgresql://user@host/database", key=value pairs of libpq, or "embedded"'


def is_embedded(dsn: str) -> bool:
    """Whether it means a server of our own: `embedded` or `embedded:DIR`."""
    return _EMBEDDED.fullmatch(dsn) is not None


def dsn_refusal(dsn: str, *, embedded_allowed: bool = True) -> tuple[str, str] | None:
    """Say why it cannot be a connection string, and the remedy; None where it can."""
    if is_embedded(dsn):
        if not embedded_allowed:
            return "cannot be an embedded server", "leave it out: the embedded server is listened to directly"
        return ("names no folder", 'write "embedded", or "embedded:DIR"') if dsn == "embedded:" else None
    scheme = _OTHER_SCHEME.match(dsn)
    if scheme is not None and scheme[1].lower() not in {"postgresql", "postgres"}:
        if scheme[1].lower().startswith("postgres"):
            fixed = "postgresql" + dsn[scheme.end(1) :].partition("@")[0][:3] + "..."
            return f'has a scheme of SQLAlchemy, "{scheme[1]}"', f'write "{fixed}", without the driver'
        return f'has the scheme "{scheme[1]}", which is not PostgreSQL', _REMEDY
    return _libpq_refusal(dsn)


def _libpq_refusal(dsn: str) -> tuple[str, str] | None:
    """Ask libpq whether it can read the string."""
    from psycopg import ProgrammingError  # noqa: PLC0415 - 100 ms that a command without a database need not pay
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415 - see above

    try:
        conninfo_to_dict(dsn)
    except ProgrammingError as error:
        return f"cannot be read: {' '.join(str(error).split())}", _REMEDY
    return None

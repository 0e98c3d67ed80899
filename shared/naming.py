"""The names of queues, of their dead-letter queues, and of what PGMQ makes of them.

Names are `[a-z0-9_]+` and at most 47 bytes, so that every table, index and trigger that PGMQ derives from one fits
into PostgreSQL's 63 bytes, and so that quoting never changes what a name means.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from shared.errors import ValidationError

__all__ = [
    "MAX_NAME_BYTES",
    "a_table",
    "dead_letter_queue_name",
    "is_queue_name",
    "notify_channel",
    "q_table",
    "validate_queue_name",
]

MAX_NAME_BYTES: Final = 47

_NAME: Final = re.compile(r"[a-z0-9_]+", re.ASCII)
_SHORT_SUFFIX: Final = "_dlq"
_LONG_SUFFIX: Final = "_dlq_"
_HASH_DIGITS: Final = 16


def is_queue_name(name: object) -> bool:
    """Whether `validate_queue_name` would accept it."""
    return isinstance(name, str) and len(name) <= MAX_NAME_BYTES and _NAME.fullmatch(name) is not None


def validate_queue_name(name: str) -> None:
    """Raise `ValidationError` with the reason and a remedy unless `name` can be a queue."""
    if is_queue_name(name):
        return
    reason, remedy = _complaint(name)
    raise ValidationError(f"queue name {_shown(name)} {reason}", remedy=remedy)


def _complaint(name: object) -> tuple[str, str]:
    """Say what is wrong with a name that is not one, most telling reason first."""
    if not isinstance(name, str):
        return f"is {type(name).__name__}, not text", "use text of a-z, 0-9 and _"
    if not name:
        return "is empty", "use a-z, 0-9 and _, one to 47 of them"
    if not name.isascii():
        return "has a character outside ASCII", "use a-z, 0-9 and _ only"
    offending = next((char for char in name if not _NAME.fullmatch(char)), None)
    if offending is None:
        return (
            f"is {len(name)} bytes long, the limit is {MAX_NAME_BYTES}",
            f"shorten it to {MAX_NAME_BYTES} bytes, the tables' names are derived from it",
        )
    match offending:
        case "-":
            return "has a '-'", f"use '_': {_suggestion(name)}"
        case " " | "\t" | "\n" | "\r":
            return "has white space", f"use '_': {_suggestion(name)}"
        case "'" | '"' | "`":
            return "has a quote", "leave quotes out, names are quoted where that is needed"
        case upper if upper.isupper():
            return "has an upper-case letter", f"use lower case: {_suggestion(name)}"
        case other:
            return f"has the character {other!r}", "use a-z, 0-9 and _ only"


def _suggestion(name: str) -> str:
    """Derive an acceptable name from one that is not."""
    return re.sub(r"[^a-z0-9_]", "_", name.strip().lower())[:MAX_NAME_BYTES]


def _shown(name: object) -> str:
    """Quote a name for a message, safe on a terminal and bounded."""
    text = ascii(name)
    return text if len(text) <= 120 else text[:117] + "..."


def dead_letter_queue_name(queue: str) -> str:
    """Name the dead-letter queue of `queue`.

    `<queue>_dlq` up to 43 bytes; longer names keep a prefix and end in `_dlq_` and 16 hexadecimal digits of a hash of
    the whole name, 47 bytes in all. The hash must never change: queues are found by it.
    """
    validate_queue_name(queue)
    if len(queue) + len(_SHORT_SUFFIX) <= MAX_NAME_BYTES:
        return queue + _SHORT_SUFFIX
    digest = hashlib.blake2b(queue.encode("ascii"), digest_size=_HASH_DIGITS // 2).hexdigest()
    return queue[: MAX_NAME_BYTES - len(_LONG_SUFFIX) - _HASH_DIGITS] + _LONG_SUFFIX + digest


def q_table(queue: str) -> str:
    """Name the table in schema pgmq that holds the live messages of `queue`."""
    validate_queue_name(queue)
    return f"q_{queue}"


def a_table(queue: str) -> str:
    """Name the table in schema pgmq that holds the archived messages of `queue`."""
    validate_queue_name(queue)
    return f"a_{queue}"


def notify_channel(queue: str) -> str:
    """Name the channel on which PGMQ's trigger announces inserts into `queue`."""
    return f"pgmq.{q_table(queue)}.INSERT"

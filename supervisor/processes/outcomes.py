"""Meta of the child's frames, checked: what a handler can influence never reaches the core unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shared.pgmq.records import AckMode
from shared.wire.frames import ProtocolError
from supervisor.core.types import ErrorInfo, Outcome, OutcomeKind, TxIdentity

Meta = Mapping[str, Any]

MAX_DELAY_MS: Final = 9_007_199_254_740
MAX_INT64: Final = (1 << 63) - 1
_KINDS: Final = {kind.value: kind for kind in OutcomeKind}
_ACKS: Final = {mode.value: mode for mode in AckMode}


def parse_outcome(meta: Meta) -> Outcome:
    """An outcome from RESULT's or COMMIT_REQUEST's meta. Raises `ProtocolError`."""
    kind = _KINDS.get(text(meta, "kind"))
    if kind is None:
        raise ProtocolError(f"unknown outcome {str(meta['kind'])[:80]!r}")
    ack_name = optional_text(meta, "ack")
    if ack_name is not None and ack_name not in _ACKS:
        raise ProtocolError(f"unknown ack {ack_name[:80]!r}")
    return Outcome(
        kind=kind,
        delay_ms=None if meta.get("delay_ms") is None else integer(meta, "delay_ms", 0, MAX_DELAY_MS),
        ack=None if ack_name is None else _ACKS[ack_name],
        reason=optional_text(meta, "reason"),
        error=optional_error(meta, "error"),
        permanent=boolean(meta, "permanent"),
        sqlstate=optional_text(meta, "sqlstate"),
    )


def parse_transaction(meta: Meta) -> TxIdentity:
    """The identity of a transaction from TX_CLAIMED's meta. Raises `ProtocolError`."""
    return TxIdentity(
        xid=None if meta.get("xid") is None else integer(meta, "xid", 1, MAX_INT64),
        backend_pid=integer(meta, "backend_pid", 0, MAX_INT64),
        backend_start_us=integer(meta, "backend_start_us", 0, MAX_INT64),
    )


def integer(meta: Meta, key: str, low: int, high: int) -> int:
    """A number within bounds; True and 1.0 are none."""
    value = meta.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{key}: {str(value)[:80]!r} is no integer from {low} to {high}")
    return value


def optional_seconds(meta: Meta, key: str) -> float | None:
    """A duration in seconds that is finite and not negative, or None."""
    value = meta.get(key)
    if value is None:
        return None
    if type(value) not in {int, float} or not 0 <= value < MAX_DELAY_MS:
        raise ProtocolError(f"{key}: {str(value)[:80]!r} is no duration")
    return float(value)


def boolean(meta: Meta, key: str) -> bool:
    """True or false; absent is false."""
    value = meta.get(key, False)
    if type(value) is not bool:
        raise ProtocolError(f"{key}: {str(value)[:80]!r} is no boolean")
    return value


def text(meta: Meta, key: str) -> str:
    """A text that must be there."""
    value = meta.get(key)
    if type(value) is not str:
        raise ProtocolError(f"{key}: a text is missing")
    return value


def optional_text(meta: Meta, key: str) -> str | None:
    """A text or None."""
    return None if meta.get(key) is None else text(meta, key)


def optional_error(meta: Meta, key: str) -> ErrorInfo | None:
    """An exception as the child describes it, or None."""
    value = meta.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ProtocolError(f"{key}: no object")
    return ErrorInfo(text(value, "type"), text(value, "message"), text(value, "traceback"))

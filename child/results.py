"""Packing an outcome so that it always fits into a frame."""

from __future__ import annotations

from typing import Final

from child.outcomes import Meta
from shared.text import clean_text
from shared.wire.frames import Kind, ProtocolError, encode

_SMALLER: Final = (1 << 14, 1 << 11, 64)


def fit_result(kind: Kind, seq: int, outcome: Meta) -> bytes:
    """Encode; where the escapes of JSON blow 64 KiB of text up over the limit of a frame, cut the texts further."""
    for limit in (None, *_SMALLER):
        try:
            return encode(kind, seq, outcome if limit is None else _cut(outcome, limit))
        except (ProtocolError, ValueError, MemoryError, RecursionError):
            continue
    return encode(kind, seq, {"kind": "error"})


def _cut(outcome: Meta, limit: int) -> Meta:
    cut = dict(outcome)
    for key in ("reason", "error", "traceback"):
        if isinstance(cut.get(key), str):
            cut[key] = clean_text(cut[key], limit)
    if isinstance(error := cut.get("error"), dict):
        cut["error"] = {key: clean_text(value, limit) for key, value in error.items()}
    return cut

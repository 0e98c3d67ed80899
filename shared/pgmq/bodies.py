"""Bodies and headers: Python values as JSON, or JSON text that passes through as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shared.errors import ProtocolError, ValidationError

__all__ = ["MAX_BODY_BYTES", "RawJson", "decode", "encode_body", "encode_headers"]

MAX_BODY_BYTES: Final = 255 << 20
"""jsonb cannot hold more; a larger text would travel in vain."""


@dataclass(frozen=True, slots=True)
class RawJson:
    """JSON text (or its UTF-8 bytes) that is not parsed here: 400-digit numbers and the like arrive as they are."""

    text: str | bytes


def encode_body(value: object) -> str:
    """Write a body as JSON text. None is JSON null. Raises `ValidationError` for what JSON cannot say."""
    text = _encode(value, "body")
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_BODY_BYTES:
        raise ValidationError(
            f"the body has {size} bytes, the limit is {MAX_BODY_BYTES}",
            remedy="keep large contents elsewhere and send their address",
        )
    return text


def encode_headers(headers: Mapping[str, object] | RawJson | None) -> str | None:
    """Write headers as JSON text; none are SQL NULL. Raises `ValidationError`."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping | RawJson):
        raise ValidationError(
            f"headers are {type(headers).__name__}, not a mapping", remedy="give a dictionary, or RawJson"
        )
    return _encode(dict(headers) if isinstance(headers, Mapping) else headers, "headers")


def _encode(value: object, what: str) -> str:
    try:
        if isinstance(value, RawJson):
            text = value.text if isinstance(value.text, str) else value.text.decode("utf-8")
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # Finds lone surrogates, which no encoding of PostgreSQL can carry.
        if not text.isascii():
            text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(
            f"the {what} cannot be written as JSON: {error}", remedy="use what json.dumps takes, or RawJson"
        ) from error
    return text


def decode(text: str | None, what: str) -> Any:
    """Read JSON text; SQL NULL is None. Raises `ProtocolError` where Python cannot read it: then use the raw text."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"the {what} cannot be read: {error}", operation="decode", remedy="use the raw text"
        ) from error

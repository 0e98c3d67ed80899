"""Text that came from anywhere, made fit for a bounded jsonb document: the dead-letter move cannot fail on it."""

from __future__ import annotations

from typing import Final

__all__ = ["CUT_MARKER", "TEXT_LIMIT_BYTES", "clean_text"]

TEXT_LIMIT_BYTES: Final = 65_536
CUT_MARKER: Final = " ... [cut]"


def clean_text(value: object, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return `value` as text without NUL and lone surrogates, at most `limit_bytes` long in UTF-8; never raises.

    jsonb refuses U+0000 and lone surrogates. Bytes are decoded, other objects shown by `str`, and an object whose
    `__str__` raises by the name of its type. What is too long is cut at a character and ends in a marker.
    """
    limit = max(0, limit_bytes)
    text = _as_text(value, limit)
    if "\x00" in text:
        text = text.replace("\x00", "")
    # Each character becomes at least one byte, so no more than limit + 1 of them can matter: a text of a gigabyte is
    # not encoded to be cut. The way through UTF-16 joins surrogates that form a pair and replaces those that do not.
    window = text[: limit + 1].encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
    data = window.encode("utf-8")
    if len(data) <= limit:
        return window
    marker = CUT_MARKER if limit > 2 * len(CUT_MARKER) else ""
    return data[: limit - len(marker)].decode("utf-8", errors="ignore") + marker


def _as_text(value: object, limit: int) -> str:
    """Turn anything into a real str, whatever its methods do."""
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value[: 4 * limit + 4]).decode("utf-8", errors="replace")
        # A subclass of str may override every method; str.__str__ gives its real characters.
        return str.__str__(value if isinstance(value, str) else str(value))
    except BaseException:  # noqa: BLE001 - the object comes from a handler; its __str__ may raise or exit
        return _type_name(value)


def _type_name(value: object) -> str:
    """Name the type of an object that cannot be shown."""
    try:
        return str.__str__(f"<{type(value).__name__} that cannot be shown>")
    except BaseException:  # noqa: BLE001 - a metaclass may have a property of this name
        return "<object that cannot be shown>"

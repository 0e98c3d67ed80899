"""Reading along on a connection to PostgreSQL: which statements a client says, and when an answer is whole.

Only what a proxy has to know. A connection that turns to TLS is passed on unread.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["Answers", "Statements"]

_ENCRYPTION: Final = frozenset({80877103, 80877104})  # SSLRequest, GSSENCRequest
_CANCEL: Final = 80877102


class Statements:
    """The client's side: bytes in, texts of the statements that are whole out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._prepared: dict[bytes, str] = {}
        self._started = False
        self.asked_for_encryption = False
        self.opaque = False

    def feed(self, data: bytes) -> list[str]:
        """Take what the client sent."""
        if self.opaque:
            return []
        self._buffer += data
        found: list[str] = []
        while (message := self._next()) is not None:
            kind, payload = message
            if kind == b"Q":
                found.append(_text(payload))
            elif kind == b"P":
                name, text = payload.split(b"\0", 1)
                if name:
                    self._prepared[name] = _text(text)  # said when it is bound, not now
                else:
                    found.append(_text(text))
            elif kind == b"B" and (name := payload.split(b"\0", 2)[1]):
                found.append(self._prepared.get(name, ""))
        return found

    def _next(self) -> tuple[bytes, bytes] | None:
        head = 1 if self._started else 0
        if len(self._buffer) < head + 4:
            return None
        (length,) = struct.unpack_from("!I", self._buffer, head)
        if len(self._buffer) < head + length:
            return None
        kind, payload = bytes(self._buffer[:head]), bytes(self._buffer[head + 4 : head + length])
        del self._buffer[: head + length]
        if not self._started:
            (code,) = struct.unpack_from("!I", payload)
            if code in _ENCRYPTION:
                self.asked_for_encryption = True
            elif code == _CANCEL:
                self.opaque = True
            else:
                self._started = True
        return kind, payload


class Answers:
    """The server's side: bytes in, whether it is ready for the next statement out."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take what the server sent; tell whether it includes the end of an answer."""
        if self._statements.opaque:
            return False
        self._buffer += data
        if self._statements.asked_for_encryption and self._buffer:
            # One byte, without a length: N is no, everything else is the beginning of what nobody can read.
            self._statements.asked_for_encryption = False
            self._statements.opaque = self._buffer[:1] != b"N"
            del self._buffer[:1]
        ready = False
        while len(self._buffer) >= 5:
            (length,) = struct.unpack_from("!I", self._buffer, 1)
            if len(self._buffer) < 1 + length:
                break
            ready = ready or self._buffer[:1] == b"Z"
            del self._buffer[: 1 + length]
        return ready


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", errors="replace")

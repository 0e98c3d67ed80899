"""Frames: a fixed header, optional JSON meta, an optional raw body. Pure: bytes in, frames out, no I/O.

Both directions use the same header::

    magic u8 | kind u8 | flags u16 | meta_len u32 | body_len u32 | seq u64      (20 bytes, network order)

`seq` is the dispatch (or permit) that a frame belongs to, so that a late answer can never be taken for the answer to
the next message. The hot frames (DISPATCH, STARTED, SUCCESS) carry no JSON: packing and parsing JSON costs more than
the rest of the way. A frame counts only when it arrived whole; what breaks the rules raises `ProtocolError`, after
which the stream is beyond repair and the process at the other end is killed by its owner.

Nothing is pickled: the parent must not run code that a handler can choose.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Final, TypeAlias

PROTOCOL: Final = 1  # another number with every change of what the two processes say to each other
MAGIC: Final = 0xB7
HEADER: Final = struct.Struct("!BBHIIQ")
MAX_META_BYTES: Final = 1 << 20
MAX_BODY_BYTES: Final = 256 << 20


class ProtocolError(Exception):
    """The peer broke the protocol: bad magic, unknown kind, a frame over its limit, meta that is no JSON object."""


class Kind(IntEnum):
    """What a frame says. Below 64: parent to child; from 64 on: child to parent."""

    DISPATCH = 1  # body: head, headers, message body; see `Dispatched`
    STOP = 2  # meta: {"reason": "soft_timeout" | "shutdown" | "cancelled" | "lease_lost"}
    EXIT = 3  # finish in order: no message follows
    PERMIT = 4  # transactional: claim one message. meta: {"time_limit_ms", "owed": [[msg_id, attempts, deaths], ...]}
    VERDICT = 5  # transactional: answer to COMMIT_REQUEST. meta: the verdict, see docs/protocol.md
    HELLO = 6  # first frame: what the child is. meta: see docs/protocol.md

    READY = 64  # handler imported. meta: {"rss_kb": int, ...}
    BOOT_FAILED = 65  # meta: {"kind": "import" | "missing" | "signature" | "version", "error": str, "traceback": str}
    STARTED = 66  # the handler is about to be called
    SUCCESS = 67  # the handler returned, nothing to add
    RESULT = 68  # any other outcome. meta: the outcome
    PROGRESS = 69  # meta: {"text": str}
    LOG = 70  # meta: {"level": str, "text": str}
    SWEPT = 76  # processes that the message left behind were killed. meta: {"count": int}
    TX_EMPTY = 71  # transactional: nothing to claim. meta: {"next_visible_s": float | null}
    TX_CLAIMED = 72  # transactional: a message was claimed. meta: see docs/protocol.md
    COMMIT_REQUEST = 73  # transactional: handler ended. meta: the outcome
    COMMITTED = 74  # transactional: PostgreSQL said so
    TX_ENDED = 75  # transactional: the transaction ended without a commit we know of. meta: error, in_doubt


class Flag(IntFlag):
    """Bits of the header's `flags`."""

    NONE = 0
    BODY_NULL = 1  # DISPATCH: the message is SQL NULL


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame."""

    kind: Kind
    seq: int
    meta: dict[str, Any]
    body: bytes
    flags: int


_KINDS: Final = {int(k): k for k in Kind}
_NO_META: Final[dict[str, Any]] = {}


def encode(kind: Kind, seq: int, meta: dict[str, Any] | None = None, body: bytes = b"", flags: int = 0) -> bytes:
    """Pack a frame. Raises `ProtocolError` when it is over a limit (own fault: nothing was sent)."""
    packed = b"" if not meta else json.dumps(meta, separators=(",", ":")).encode("ascii")
    if len(packed) > MAX_META_BYTES or len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"{kind.name}: meta {len(packed)} or body {len(body)} bytes is over the limit")
    return HEADER.pack(MAGIC, kind, flags, len(packed), len(body), seq) + packed + body


class Decoder:
    """Collects bytes and yields whole frames. After a `ProtocolError` it must not be used again."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Add what was read; return the frames that are now whole, in order."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        offset, size = 0, len(buffer)
        while size - offset >= HEADER.size:
            magic, kind_number, flags, meta_len, body_len, seq = HEADER.unpack_from(buffer, offset)
            kind = _KINDS.get(kind_number)
            if magic != MAGIC or kind is None:
                raise ProtocolError(f"not a frame: magic {magic:#x}, kind {kind_number}")
            if meta_len > MAX_META_BYTES or body_len > MAX_BODY_BYTES:
                raise ProtocolError(f"{kind.name}: meta {meta_len} or body {body_len} bytes is over the limit")
            end = offset + HEADER.size + meta_len + body_len
            if size < end:
                break
            meta = _NO_META
            start = offset + HEADER.size
            if meta_len:
                meta = _parse_meta(kind, bytes(buffer[start : start + meta_len]))
            frames.append(Frame(kind, seq, meta, bytes(buffer[start + meta_len : end]) if body_len else b"", flags))
            offset = end
        if offset:
            del buffer[:offset]
        return frames


def _parse_meta(kind: Kind, packed: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(packed)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind.name}: meta is no JSON") from error
    if not isinstance(meta, dict):
        raise ProtocolError(f"{kind.name}: meta is no object")
    return meta


Dispatched: TypeAlias = tuple[int, int, int, int, int, int, bytes, bytes | None]
"""A DISPATCH: seq, msg_id, attempt, deliveries, enqueued_us, limit_ms, headers, body.

enqueued_us: microseconds since the epoch, the database's clock. limit_ms: hard_timeout, which counts from the start of
the handler; -1: none. headers: JSON text, empty for none. body: None for SQL NULL. `deliveries` is PGMQ's read_ct,
which anybody may have written, so it has a sign.

A bare tuple, as it is made and taken apart for each message, by processes whose caches are cold (ADR 0026).
"""

_HEAD: Final = "qIiqqI"  # msg_id, attempt, deliveries, enqueued_us, limit_ms, length of the headers
_DISPATCH_HEAD: Final = struct.Struct("!" + _HEAD)
_DISPATCH: Final = struct.Struct(HEADER.format + _HEAD)
_DISPATCH_BYTES: Final = _DISPATCH.size
_HEADER_BYTES: Final = HEADER.size
_unpack_dispatch: Final = _DISPATCH.unpack_from
_DISPATCH_KIND: Final = int(Kind.DISPATCH)
_BODY_NULL: Final = int(Flag.BODY_NULL)  # `int & Flag` makes a member: a microsecond on the hot path


def encode_dispatch(message: Dispatched) -> bytes:
    """Pack a DISPATCH. Raises `ProtocolError` over the body limit."""
    seq, msg_id, attempt, deliveries, enqueued_us, limit_ms, headers, body = message
    flags = 0
    if body is None:
        flags, body = _BODY_NULL, b""
    size = _DISPATCH_BYTES - _HEADER_BYTES + len(headers) + len(body)
    if size > MAX_BODY_BYTES:
        raise ProtocolError(f"message {msg_id}: {size} bytes is over the limit of {MAX_BODY_BYTES}")
    head = _DISPATCH.pack(
        MAGIC,
        _DISPATCH_KIND,
        flags,
        0,
        size,
        seq,
        msg_id,
        attempt,
        deliveries,
        enqueued_us,
        limit_ms,
        len(headers),
    )
    return b"".join((head, headers, body))


def whole_dispatch(data: bytes) -> Dispatched | None:
    """Take a DISPATCH apart where `data` is just that frame, which is nearly always so. None: it is something else."""
    size = len(data)
    if size < _DISPATCH_BYTES:
        return None
    magic, kind, flags, meta_len, body_len, seq, msg_id, attempt, deliveries, enqueued_us, limit_ms, headers_len = (
        _unpack_dispatch(data)
    )
    if magic != MAGIC or kind != _DISPATCH_KIND or meta_len or size != _HEADER_BYTES + body_len:
        return None
    headers, start = b"", _DISPATCH_BYTES
    if headers_len:
        headers, start = data[start : start + headers_len], start + headers_len
        if size < start:
            raise ProtocolError("DISPATCH is too short for its headers")
    body = None if flags & _BODY_NULL else data[start:]
    return seq, msg_id, attempt, deliveries, enqueued_us, limit_ms, headers, body


def rest_of_dispatch(data: bytes) -> int:
    """How many bytes are missing of the DISPATCH that `data` begins with; 0 where that cannot be said."""
    if len(data) < _HEADER_BYTES:
        return 0
    magic, kind, _, meta_len, body_len, _ = HEADER.unpack_from(data)
    if magic != MAGIC or kind != _DISPATCH_KIND or meta_len or body_len > MAX_BODY_BYTES:
        return 0
    missing: int = _HEADER_BYTES + body_len - len(data)
    return max(0, missing)


def decode_dispatch(frame: Frame) -> Dispatched:
    """Take a DISPATCH apart that came through `Decoder`."""
    data = frame.body
    if len(data) < _DISPATCH_HEAD.size:
        raise ProtocolError("DISPATCH is too short")
    msg_id, attempt, deliveries, enqueued_us, limit_ms, headers_len = _DISPATCH_HEAD.unpack_from(data)
    split = _DISPATCH_HEAD.size + headers_len
    if len(data) < split:
        raise ProtocolError("DISPATCH is too short for its headers")
    body = None if frame.flags & _BODY_NULL else data[split:]
    headers = data[_DISPATCH_HEAD.size : split]
    return frame.seq, msg_id, attempt, deliveries, enqueued_us, limit_ms, headers, body

"""One child's two pipes: bytes in become events, frames go out, and neither direction ever blocks the loop.

The frame of a message that just succeeds carries nothing but its header and is recognised without a decoder; everything
else goes through `Decoder` and `Conversation`. After the first breach of the protocol nothing more is read.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from shared.wire.frames import HEADER, MAGIC, MAX_BODY_BYTES, MAX_META_BYTES, Decoder, Frame, Kind, ProtocolError
from supervisor.core.events import Event, MessageFinished, MessageStarted, ProtocolBroken
from supervisor.core.types import SUCCESS, ChildId, ClaimId
from supervisor.processes.conversation import Conversation, LogLine, State, Swept

_CHUNK_BYTES: Final = 64 << 10
_MAX_PENDING_OUT_BYTES: Final = MAX_BODY_BYTES + (16 << 20)  # one message at a time, and room for small frames
_MAX_PENDING_IN_BYTES: Final = 2 * MAX_META_BYTES
_MAX_LAST_WORDS_BYTES: Final = 16 << 20
_EOF_PATIENCE_S: Final = 0.2  # a dying process closes its pipe a moment before its pidfd says so
_BARE: Final = struct.Struct("!QIQ")  # a header that is a whole frame, as three numbers: no flags, meta or body
_SUCCESS: Final = MAGIC << 56 | Kind.SUCCESS << 48
_HAS_MESSAGE: Final = (State.HANDED, State.RUNNING)
_buffer = bytearray(_CHUNK_BYTES)  # shared: one thread, and nothing in it outlives a callback
_view = memoryview(_buffer)
_BUFFERS: Final = (_buffer,)


class Channel:
    """Talks with one child. `before_result` runs before a result is told: the output until then is its message's.

    `begun` gives the number of the message that the child marked last as begun.
    """

    def __init__(
        self,
        *,
        child: ChildId,
        from_child_fd: int,
        to_child_fd: int,
        begun: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Event], None],
        on_log: Callable[[ChildId, ClaimId | None, str, str], None],
        before_result: Callable[[], None],
        on_ready: Callable[[], None],
        on_swept: Callable[[int], None],
    ) -> None:
        """Start reading. The descriptors must be non-blocking; they are closed with the channel."""
        self.talk = Conversation(child)
        self.ending = False  # an end was asked for: a closed pipe is no breach
        self._child = child
        self._in_fd = from_child_fd
        self._out_fd = to_child_fd
        self._begun = begun
        self._loop = loop
        self._post = post
        self._on_log = on_log
        self._before_result = before_result
        self._on_ready = on_ready
        self._on_swept = on_swept
        self._decoder = Decoder()
        self._pending: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._reading = True
        self._broken = False
        self._closed = False
        loop.add_reader(from_child_fd, self._on_readable)

    # --- out ----------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send now what the pipe takes and the rest when it takes more. A dead peer is its pidfd's business."""
        if self._closed:
            return
        sent = 0
        if not self._pending:
            try:
                sent = os.write(self._out_fd, data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return
            if sent == len(data):
                return
        self._pending_bytes += len(data) - sent
        if self._pending_bytes > _MAX_PENDING_OUT_BYTES:
            self._break(f"{self._pending_bytes} bytes wait to be read by the child")
            return
        if not self._pending:
            self._loop.add_writer(self._out_fd, self._on_writable)
        self._pending.append(memoryview(data)[sent:])

    def _on_writable(self) -> None:
        try:
            head = self._pending[0]
            sent = os.write(self._out_fd, head)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop_pending()
            return
        self._pending_bytes -= sent
        if sent < len(head):
            self._pending[0] = head[sent:]
            return
        self._pending.popleft()
        if not self._pending:
            self._loop.remove_writer(self._out_fd)

    def _drop_pending(self) -> None:
        if self._pending:
            self._pending.clear()
            self._pending_bytes = 0
            self._loop.remove_writer(self._out_fd)

    # --- in -----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            count = os.readv(self._in_fd, _BUFFERS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self._stop_reading()
            self._loop.call_later(_EOF_PATIENCE_S, self._judge_silence)
        elif not (count == HEADER.size and self._take_success()):
            self._take(bytes(_view[:count]))

    def _take_success(self) -> bool:
        """Read SUCCESS where it is what came. False: nothing was taken, decode as usual."""
        talk = self.talk
        claim_id = talk.claim_id
        if claim_id is None or self._decoder.pending_bytes or talk.state not in _HAS_MESSAGE:
            return False
        if _BARE.unpack_from(_buffer) != (_SUCCESS, 0, claim_id):
            return False
        self._before_result()
        talk.state = State.IDLE
        talk.claim_id = None
        self._post(MessageFinished(self._child, claim_id, SUCCESS))  # which says that it had begun
        return True

    def awaits_start(self) -> bool:
        """Whether a message was handed over and not begun; where it was, that is told."""
        talk = self.talk
        claim_id = talk.claim_id
        if talk.state is not State.HANDED or claim_id is None:
            return False
        if self._begun() != claim_id:
            return True
        talk.state = State.RUNNING
        self._post(MessageStarted(self._child, claim_id))
        return False

    def _take(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
            if self._decoder.pending_bytes > _MAX_PENDING_IN_BYTES:
                raise ProtocolError("a frame over the limit")
            for frame in frames:
                self._take_frame(frame)
        except ProtocolError as error:
            self._break(str(error))

    def _take_frame(self, frame: Frame) -> None:
        had_claim = self.talk.claim_id
        said = self.talk.take(frame)
        if isinstance(said, LogLine):
            self._on_log(self._child, said.claim_id, said.level, said.text)
        elif isinstance(said, Swept):
            self._on_swept(said.number)
        elif said is not None:
            if had_claim is not None and self.talk.claim_id is None:
                self._before_result()
            elif frame.kind is Kind.READY:
                self._on_ready()
            self._post(said)

    def drain(self) -> None:
        """The process has ended: take what it had written; frames that are whole count, the rest is dropped."""
        self.awaits_start()
        left = _MAX_LAST_WORDS_BYTES
        while self._reading and left > 0:
            try:
                data = os.read(self._in_fd, _CHUNK_BYTES)
            except OSError:
                break
            if not data:
                break
            left -= len(data)
            self._take(data)
        self.close()

    # --- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop both directions and close the pipes. May be called again."""
        if self._closed:
            return
        self._stop_reading()
        self._drop_pending()
        self._closed = True
        os.close(self._in_fd)
        os.close(self._out_fd)

    def _judge_silence(self) -> None:
        if not self._closed and not self.ending:
            self._break("it closed its pipe and goes on")

    def _break(self, why: str) -> None:
        self._stop_reading()
        self._drop_pending()
        if not self._broken:
            self._broken = True
            self._post(ProtocolBroken(self._child, why))

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._in_fd)

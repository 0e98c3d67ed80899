"""The child's ends of the two pipes: whole frames in, whole frames out.

The main thread receives when it is idle; while a handler runs, whichever thread asks `stop_reason` looks without
blocking whether a STOP has come. So there is no reader thread, and no hand-over between threads on the hot path.

    parent ──▶ pipe ──▶ receive (main, idle) / look (any thread, handler running) ──▶ frames in order
    handler threads: LOG, PROGRESS ──┐
    main: results ───────────────────┴─▶ one lock ──▶ pipe ──▶ parent
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import Any, Final

from shared.wire.frames import (
    Decoder,
    Dispatched,
    Frame,
    Kind,
    ProtocolError,
    decode_dispatch,
    encode,
    rest_of_dispatch,
    whole_dispatch,
)

_CHUNK_BYTES: Final = 1 << 16
_ENDED: Final = "ended"


class Disconnected(Exception):
    """The pipe is gone: the parent ended, or a handler closed what was not its own."""


class Channel:
    """One stream of frames. `seq` is the message in hand, 0 between messages; the main thread alone writes it.

    `wary`: a handler has left a function for its alarm behind, which may raise between messages. Python calls it when a
    system call has returned, and if that was a read, what was read is gone. So the child waits in `poll`, not in
    `read`; an alarm in the few instructions around a read that does not wait still costs the deadline for starts.
    """

    def __init__(self, in_fd: int, out_fd: int) -> None:
        self._in_fd = in_fd
        self._out_fd = out_fd
        self._arrival = select.poll()
        self._arrival.register(in_fd, select.POLLIN)
        self._decoder = Decoder()
        self._cut = False  # the decoder has the beginning of a frame
        self._frames: deque[Frame] = deque()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._stop: str | None = None
        self._closed = False
        self.wary = False
        self.seq = 0
        self.pid = os.getpid()

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None = None) -> Frame | Dispatched:
        """Wait for the next frame; a DISPATCH comes taken apart.

        Raises `Disconnected` at the end of the stream, `ProtocolError` for rubbish, and with `timeout_s` `TimeoutError`
        when nothing at all comes for so long.
        """
        with self._reading:
            while not self._frames:
                if self._closed:
                    raise Disconnected
                if (self.wary or timeout_s is not None) and not self._arrived(timeout_s):
                    raise TimeoutError
                try:
                    data = os.read(self._in_fd, _CHUNK_BYTES)
                except OSError as error:
                    raise Disconnected from error
                if not data:
                    raise Disconnected
                if not self._cut and (message := self._whole(data)) is not None:
                    return message
                self._frames += self._feed(data)
            return _opened(self._frames.popleft())

    def _whole(self, data: bytes) -> Dispatched | None:
        """Take a DISPATCH apart without the decoder; a large one is read into the place where it stays."""
        message = whole_dispatch(data)
        if message is None and (missing := rest_of_dispatch(data)) >= _CHUNK_BYTES:
            message = whole_dispatch(self._read_rest(data, missing))
        return message

    def _arrived(self, timeout_s: float | None) -> bool:
        return bool(self._arrival.poll(None if timeout_s is None else timeout_s * 1000))

    def _feed(self, data: bytes) -> list[Frame]:
        frames = self._decoder.feed(data)
        self._cut = self._decoder.pending_bytes > 0
        return frames

    def _read_rest(self, start: bytes, missing: int) -> bytes:
        """Read a large body into the place where it stays."""
        filled = len(start)
        size = filled + missing
        buffer = bytearray(size)
        view = memoryview(buffer)
        view[:filled] = start
        while filled < size:
            try:
                count = os.readv(self._in_fd, (view[filled:],))
            except OSError as error:
                raise Disconnected from error
            if not count:
                raise Disconnected
            filled += count
        return bytes(buffer)

    def begin(self, seq: int) -> None:
        """A message is in hand; what was said about earlier ones is forgotten."""
        self._stop = None
        self.seq = seq

    def end(self) -> None:
        """No message is in hand: what its threads still say is not sent any more."""
        self.seq = 0

    def stop_reason(self, seq: int) -> str | None:
        """Why the message should stop, or None. Any thread. A message that is over has the reason "ended"."""
        if seq != self.seq:
            return _ENDED
        if self._stop is None and os.getpid() == self.pid:
            self._look()
        return self._stop

    def stop_seen(self) -> bool:
        """Whether a stop was asked for, as far as is known without looking."""
        return self._stop is not None

    def _look(self) -> None:
        if not self._reading.acquire(blocking=False):
            return  # another thread looks right now
        try:
            if self._frames:  # read together with what came before them: the message itself, or the answer to a claim
                read = list(self._frames)
                self._frames.clear()
                self._sort(read)
            while not self._closed and self._arrival.poll(0):
                try:
                    data = os.read(self._in_fd, _CHUNK_BYTES)
                except OSError:
                    data = b""
                if not data:
                    self._closed, self._stop = True, "parent_gone"
                    break
                self._sort(self._feed(data))
        except ProtocolError:
            self._closed = True  # told by the next receive, when the handler has ended
        finally:
            self._reading.release()

    def _sort(self, frames: list[Frame]) -> None:
        """Take out STOP; what else comes while a handler runs waits for `receive`."""
        for frame in frames:
            if frame.kind is not Kind.STOP:
                self._frames.append(frame)
            elif frame.seq == self.seq:
                self._stop = str(frame.meta.get("reason") or "stopped")

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a packed frame. Raises `Disconnected`."""
        with self._writing:
            try:
                sent = os.write(self._out_fd, data)
                while sent < len(data):  # a signal's function ran in the middle
                    sent += os.write(self._out_fd, memoryview(data)[sent:])
            except OSError as error:
                raise Disconnected from error

    def say(self, kind: Kind, seq: int, meta: dict[str, Any]) -> None:
        """Send a remark (LOG, PROGRESS) about a message, from any thread; silence when it is over, or for a copy."""
        if seq != self.seq or os.getpid() != self.pid:
            return
        try:
            self.send(encode(kind, seq, meta))
        except (Disconnected, ProtocolError):
            return


def _opened(frame: Frame) -> Frame | Dispatched:
    return decode_dispatch(frame) if frame.kind is Kind.DISPATCH else frame

"""The parent's side of a real child, for tests: spawn it, send frames, read frames, each with a deadline."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from shared.wire.frames import PROTOCOL, Decoder, Frame, Kind, encode, encode_dispatch
from shared.wire.startmark import PAGE_BYTES, make_room, read_mark
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
CHILD_MAIN: Final = ROOT / "child" / "__main__.py"
HANDLERS: Final = ROOT / "tests" / "handlers"
DUMP_SIGNAL: Final = int(signal.SIGUSR2)
DEADLINE_S: Final = 20.0
ASIDES: Final = frozenset({Kind.LOG, Kind.PROGRESS, Kind.SWEPT})


class ChildGone(AssertionError):
    """The child closed its end while a frame was awaited."""


class ChildHarness:
    """One child. Leaving the context kills it if it still lives."""

    def __init__(
        self,
        handler: str,
        *,
        mode: str = "regular",
        app_dir: Path = HANDLERS,
        queue: str = "orders",
        interpreter: str = sys.executable,
        env: Mapping[str, str] | None = None,
        hello: Mapping[str, Any] | None = None,
        wait_ready: bool = True,
        claimed_parent: int | None = None,
    ) -> None:
        self.asides: list[Frame] = []
        self._frames: deque[Frame] = deque()
        self._decoder = Decoder()
        self._seq = 0
        self._output = b""
        self.in_fd, child_out_fd = os.pipe()
        child_in_fd, self.out_fd = os.pipe()
        self.stack_fd = os.memfd_create("stack", os.MFD_CLOEXEC)
        make_room(self.stack_fd)
        fcntl.fcntl(self.stack_fd, fcntl.F_SETFL, os.O_APPEND)
        output_end, output_start = os.pipe()
        self._output_fd = output_end
        command = [interpreter, "-u", "-P", str(CHILD_MAIN), str(child_in_fd), str(child_out_fd), str(self.stack_fd)]
        command += [str(claimed_parent or os.getpid()), queue, "-" * 120]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_start,
            stderr=output_start,
            pass_fds=(child_in_fd, child_out_fd, self.stack_fd),
            process_group=0,
            env={**os.environ, "SPT_NOENV": "1", **(env or {})},
        )
        for fd in (child_in_fd, child_out_fd, output_start):
            os.close(fd)
        self.pid = self.process.pid
        meta: dict[str, Any] = {
            "protocol": PROTOCOL,
            "queue": queue,
            "slot": 1,
            "incarnation": 1,
            "child": 1,
            "mode": mode,
            "handler": handler,
            "app_dir": str(app_dir),
            "dump_signal": DUMP_SIGNAL,
            "title": True,
            "oom_score_adj": 500,
            "metrics_dir": None,
            "metrics_identity": None,
            "sync": None,
            **(hello or {}),
        }
        try:
            self.send(Kind.HELLO, 0, meta)
            self.ready = self.expect(Kind.READY) if wait_ready else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Nothing more: the child was started when this was made."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill what lives, close what is open."""
        self.close()

    # --- frames -----------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, seq: int = 0, meta: dict[str, Any] | None = None) -> None:
        """Send one frame."""
        try:
            self.send_raw(encode(kind, seq, meta))
        except OSError as error:
            raise ChildGone(f"nobody reads: {error}; output: {self.output()!r}") from error

    def send_raw(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        deadline = time.monotonic() + DEADLINE_S
        os.set_blocking(self.out_fd, False)
        left = memoryview(data)
        while left:
            ready = select.select([], [self.out_fd], [], max(0.0, deadline - time.monotonic()))[1]
            assert ready, f"nobody reads; output: {self.output()!r}"
            left = left[os.write(self.out_fd, left) :]

    def receive(self, timeout_s: float = DEADLINE_S) -> Frame:
        """The next frame that is no remark; remarks are collected in `asides`."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if frame.kind not in ASIDES:
                    return frame
                self.asides.append(frame)
            if not select.select([self.in_fd], [], [], max(0.001, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no frame within {timeout_s:g} s; output: {self.output()!r}")
            data = os.read(self.in_fd, 1 << 16)
            if not data:
                raise ChildGone(f"the child closed its end; output: {self.output()!r}")
            self._frames.extend(self._decoder.feed(data))

    def expect(self, kind: Kind, seq: int | None = None, timeout_s: float = DEADLINE_S) -> Frame:
        """The next frame, which must be of this kind."""
        frame = self.receive(timeout_s)
        assert frame.kind is kind, f"{frame} instead of {kind.name}; output: {self.output()!r}"
        assert seq is None or frame.seq == seq
        return frame

    def hang_up(self) -> None:
        """Close our end of what the child reads."""
        if self.out_fd >= 0:
            os.close(self.out_fd)
            self.out_fd = -1

    # --- regular mode -----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        body: object = None,
        *,
        raw: bytes | None = b"",
        headers: bytes = b"",
        attempt: int = 1,
        msg_id: int | None = None,
        limit_ms: int = -1,
    ) -> int:
        """Hand over a message (`raw` where it is given, None for SQL NULL); returns its seq."""
        self._seq += 1
        text = json.dumps(body).encode() if raw == b"" else raw
        number = msg_id or self._seq
        self.send_raw(
            encode_dispatch((self._seq, number, attempt, attempt, 1_700_000_000_000_000, limit_ms, headers, text))
        )
        return self._seq

    def start(self, body: object = None, **options: Any) -> int:
        """Hand over a message and wait until its handler runs."""
        seq = self.dispatch(body, **options)
        eventually(lambda: read_mark(self.stack_fd) == seq, what="the start")
        return seq

    def run(self, body: object = None, **options: Any) -> dict[str, Any]:
        """Hand over a message and give its outcome; a plain success is {"kind": "success", "plain": True}."""
        return self.outcome(self.dispatch(body, **options))

    def outcome(self, seq: int, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for the outcome of a message."""
        frame = self.receive(timeout_s)
        assert frame.seq == seq, frame
        if frame.kind is Kind.SUCCESS:
            return {"kind": "success", "plain": True}
        assert frame.kind is Kind.RESULT, frame
        return frame.meta

    # --- the process ------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait for its end; the exit code, or minus the signal."""
        return self.process.wait(timeout_s)

    def stack(self) -> str:
        """What faulthandler has written."""
        return os.pread(self.stack_fd, 1 << 20, PAGE_BYTES).decode("utf-8", "replace")

    def output(self) -> str:
        """What the child has printed so far."""
        os.set_blocking(self._output_fd, False)
        while True:
            try:
                more = os.read(self._output_fd, 1 << 16)
            except BlockingIOError:
                break
            if not more:
                break
            self._output += more
        return self._output.decode("utf-8", "replace")

    def command_line(self) -> str:
        """What `ps` shows."""
        return Path(f"/proc/{self.pid}/cmdline").read_bytes().rstrip(b"\0 ").decode()

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self.hang_up()
        for fd in (self.stack_fd, self.in_fd, self._output_fd):
            os.close(fd)

"""The user's event sink, `package.module:function`: a bounded queue, a thread that writes, a process that calls.

The supervisor never imports the application, and a callback that hangs, crashes or leaks must not be its problem; see
docs/adr/0012-the-users-event-sink-is-a-process.md. Nothing here waits on the loop's thread, and what cannot be
delivered is counted.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from supervisor.telemetry.facts import AnyHappening
from supervisor.telemetry.records import sink_record

_HOST: Final = Path(__file__).with_name("sinkhost.py")
_MAX_QUEUED: Final = 10_000
_BATCH: Final = 500
_STUCK_S: Final = 5.0  # a sink that takes nothing for so long is replaced
_PAUSE_S: Final = 0.05
_BACKOFF_S: Final = (1.0, 60.0)
_HEALTHY_S: Final = 60.0


class UserSink:
    """Delivers happenings in order, at most once each."""

    def __init__(
        self,
        target: str,
        *,
        app_dir: str,
        on_dropped: Callable[[int], None],
        on_failed: Callable[[str], None],
        stuck_s: float = _STUCK_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`on_dropped` and `on_failed` are called from the sink's thread."""
        self._target = target
        self._app_dir = app_dir
        self._on_dropped = on_dropped
        self._on_failed = on_failed
        self._stuck_s = stuck_s
        self._wall = wall
        self._queue: deque[tuple[AnyHappening, float]] = deque()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff_s = _BACKOFF_S[0]
        self._heard = b""
        self._thread = threading.Thread(target=self._run, name="user-sink", daemon=True)
        self._thread.start()

    def happened(self, happening: AnyHappening) -> None:
        """Queue a happening; when the sink cannot keep up it is dropped and counted."""
        if len(self._queue) >= _MAX_QUEUED:
            self._on_dropped(1)
        else:
            self._queue.append((happening, self._wall()))

    def close(self, timeout_s: float = 3.0) -> None:
        """Deliver what is queued, for a bounded time, and end the process."""
        self._closing.set()
        self._thread.join(timeout_s)
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE_S):
            self._deliver()
        self._deliver()
        self._end(wait_s=2.0)
        self._on_dropped(len(self._queue))
        self._queue.clear()

    def _deliver(self) -> None:
        """Hand over what is queued, starting the process where there is none."""
        if self._process is not None:
            self._hear()
        if self._process is not None and self._process.poll() is not None:
            self._lost(f"ended with status {self._process.returncode}")
        if self._process is None and not self._start():
            return
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            lines = b"".join(
                json.dumps(sink_record(happening, at=at), default=str).encode() + b"\n" for happening, at in batch
            )
            if not self._write(lines):
                self._on_dropped(len(batch))
                self._lost("takes no events")
                return

    def _start(self) -> bool:
        """Start the process, unless the last one ended a short while ago."""
        now = time.monotonic()
        if self._started_at and now - self._started_at < self._backoff_s and not self._closing.is_set():
            return False
        if self._started_at and now - self._started_at > _HEALTHY_S:
            self._backoff_s = _BACKOFF_S[0]
        self._started_at = now
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", str(_HOST), self._target, self._app_dir],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
                bufsize=0,
            )
        except OSError as error:
            self._on_failed(f"cannot start the sink's process: {error}")
            self._back_off()
            return False
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(_fd(pipe), False)
        return True

    def _write(self, data: bytes) -> bool:
        """Write a batch; False when the process is gone or takes nothing for too long."""
        assert self._process is not None
        fd = _fd(self._process.stdin)
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                self._hear()
                if not poller.poll(self._stuck_s * 1000):
                    return False
            except OSError:
                return False
        return True

    def _hear(self) -> None:
        """Read what the process says about failed calls."""
        assert self._process is not None
        try:
            while data := os.read(_fd(self._process.stdout), 65_536):
                self._heard += data
        except (BlockingIOError, OSError):
            pass
        *lines, self._heard = self._heard[-65_536:].split(b"\n")
        for line in lines:
            try:
                told = json.loads(line)
                self._on_dropped(int(told["failed"]))
                self._on_failed(str(told["error"]))
            except (ValueError, TypeError, KeyError):
                continue

    def _lost(self, why: str) -> None:
        self._end(wait_s=0.0)
        self._on_failed(f"{self._target} {why}; it is started again in {self._backoff_s:g} s")
        self._back_off()

    def _back_off(self) -> None:
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_S[1])

    def _end(self, *, wait_s: float) -> None:
        """Close the pipe, give the process a moment, kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = process
        self._hear()
        self._process = None
        if process.stdout is not None:
            process.stdout.close()


def _fd(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    return pipe.fileno()

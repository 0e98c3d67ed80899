"""One child process while it lives: its descriptors, what it is doing, and the two ways to signal it.

    pipes ───▶ Channel ──▶ events            pidfd ──▶ signals, and the truth about its end
    pipe ────▶ Output ───▶ lines             memfd ──▶ StackFile, read at its end

The end itself (peek, kill the group, sweep, reap) is in `reaper`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final

from supervisor.core.commands import StartChild
from supervisor.core.types import ChildId, ClaimId
from supervisor.processes import procfs
from supervisor.processes.channel import Channel
from supervisor.processes.launcher import Launched
from supervisor.processes.output import Output
from supervisor.processes.spec import DUMP_SIGNAL, ChildSpec
from supervisor.processes.stack import StackFile

_DUMP_LIMIT_S: Final = 0.15
_DUMP_POLL_S: Final = 0.004
_DUMP_STABLE_POLLS: Final = 3


class ChildProcess:
    """A process and our ends of it. Times are CLOCK_BOOTTIME seconds."""

    def __init__(
        self,
        *,
        command: StartChild,
        spec: ChildSpec,
        launched: Launched,
        channel: Channel,
        output: Output | None,
        stack: StackFile,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        """Own everything in `launched`."""
        self.child: ChildId = command.child
        self.queue = command.queue
        self.spec = spec
        self.process = launched.process
        self.pid = launched.pid
        self.pidfd = launched.pidfd
        self.channel = channel
        self.output = output
        self.stack = stack
        self.spawned_at = clock()
        self.ready_at: float | None = None
        self.handed_at: float | None = None  # when the message in hand was handed over
        self.module_processes: frozenset[procfs.Identity] = frozenset()  # what the import had started
        self.guard_slot = -1
        self.metrics_index = 0
        self.killed = False  # by us; what else kills is told apart from it
        self.ended = False  # its pidfd said so; the sweep may still run
        self.peak_kb = 0
        self.parent_peak_kb = procfs.read_status_kb(os.getpid(), b"VmHWM")
        self._loop = loop
        self._clock = clock
        self._dump: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a message (or a permit) is in its hands."""
        return self.channel.talk.claim_id is not None

    def begin(self, claim_id: ClaimId) -> None:
        """A message is about to be handed over."""
        self.handed_at = now = self._clock()
        if self.output is not None:
            self.output.begin(claim_id, now)
        self.stack.begin()

    def end(self) -> None:
        """The result of the message in hand has arrived."""
        if self.output is not None:
            self.output.end()
        self.handed_at = None

    def measure_peak(self) -> None:
        """Remember the peak of its resident memory; a zombie has none, so this must happen before."""
        self.peak_kb = max(self.peak_kb, procfs.read_status_kb(self.pid, b"VmHWM"))

    def send_signal(self, number: int) -> None:
        """Signal the leader. Safe against reused pids; silent when it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self, *, with_stack: bool, on_kill: Callable[[ChildProcess], None]) -> None:
        """SIGKILL leader and group; with_stack: wait at most 150 ms for the dump first. `on_kill` runs just before."""
        if self.ended or self.killed:
            return
        self.channel.ending = True
        if with_stack and self._dump is None and procfs.catches_signal(self.pid, DUMP_SIGNAL):
            before = self.stack.size()
            self.send_signal(DUMP_SIGNAL)
            self._await_dump(
                size_before=before, size=before, stable=0, deadline=self._loop.time() + _DUMP_LIMIT_S, on_kill=on_kill
            )
        elif not (with_stack and self._dump is not None):
            self._kill_now(on_kill)

    def _await_dump(
        self,
        *,
        size_before: int,
        size: int,
        stable: int,
        deadline: float,
        on_kill: Callable[[ChildProcess], None],
    ) -> None:
        now_size = self.stack.size()
        stable = stable + 1 if now_size == size and now_size > size_before else 0
        if stable >= _DUMP_STABLE_POLLS or self._loop.time() >= deadline:
            self._kill_now(on_kill)
            return
        self._dump = self._loop.call_later(
            _DUMP_POLL_S,
            lambda: self._await_dump(
                size_before=size_before, size=now_size, stable=stable, deadline=deadline, on_kill=on_kill
            ),
        )

    def _kill_now(self, on_kill: Callable[[ChildProcess], None]) -> None:
        self.cancel_dump()
        if self.ended or self.killed:
            return
        self.killed = True
        self.measure_peak()
        on_kill(self)
        self.send_signal(signal.SIGKILL)
        self.kill_group()

    def cancel_dump(self) -> None:
        """Stop waiting for a stack: the process has ended by itself, or must end now."""
        if self._dump is not None:
            self._dump.cancel()
            self._dump = None

    def kill_group(self) -> None:
        """SIGKILL its process group. Only while the leader is not reaped: then the number is surely its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close what is still open; the process is reaped."""
        self.channel.close()
        if self.output is not None:
            self.output.close()
        self.stack.close()
        os.close(self.pidfd)

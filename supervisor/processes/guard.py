"""The supervisor's side of the guard: starts it first, tells it every child, restarts it when it dies, ends it last."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.processes import guard_table, procfs
from supervisor.processes.guard_main import FORGET, REGISTER, WATCH

_MAIN: Final = Path(__file__).with_name("guard_main.py")
_START_LIMIT_S: Final = 10.0
_END_LIMIT_S: Final = 3.0
_RESTART_DELAYS_S: Final = (0.0, 0.1, 0.5, 2.0, 5.0)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Ward:
    slot: int
    pid: int
    pidfd: int
    start_ticks: int


class Guard:
    """One guard process at a time. All calls come from the loop's thread and none blocks, but `start`'s spawn."""

    def __init__(self, *, owner: str, loop: asyncio.AbstractEventLoop) -> None:
        """Make the table; no process yet."""
        self._owner = owner
        self._loop = loop
        self._table_fd = guard_table.create()
        self._table = guard_table.GuardTable(self._table_fd)
        self._free = list(range(guard_table.SLOTS - 1, -1, -1))
        self._wards: dict[int, _Ward] = {}
        self._unmarked: dict[procfs.Identity, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._sock: socket.socket | None = None
        self._ready: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._failures = 0
        self._closing = False
        self._restart: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The guard's pid, None between two guards."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Spawn it and wait until it is deaf to signals. Raises `OSError` or `TimeoutError`."""
        self._spawn()
        async with asyncio.timeout(_START_LIMIT_S):
            await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Tell it by closing the socket, wait until it has looked around and left."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            self._close_socket()
            try:
                async with asyncio.timeout(_END_LIMIT_S):
                    await asyncio.shield(self._gone)
            except TimeoutError:
                self._process.kill()
                self._process.wait()
                self._forget_process()
        if self._table_fd >= 0:
            self._table.close()
            os.close(self._table_fd)
            self._table_fd = -1

    # --- children -----------------------------------------------------------------------------------------------

    def register(self, *, child: int, pid: int, pidfd: int) -> int:
        """Tell the guard a child. Returns its slot in the table, -1 when the table is full."""
        stat = procfs.read_stat(pid)
        slot = self._free.pop() if self._free else -1
        ward = _Ward(slot, pid, pidfd, 0 if stat is None else stat.start_ticks)
        self._wards[child] = ward
        if slot >= 0:
            self._table.begin(slot, child=child, pid=pid)
        self._tell(child, ward)
        return slot

    def forget(self, child: int) -> None:
        """The child is reaped; its pidfd is still open."""
        ward = self._wards.pop(child, None)
        if ward is None:
            return
        if ward.slot >= 0:
            self._table.end(ward.slot)
            self._free.append(ward.slot)
        self._send(FORGET.pack(2, child))

    def watch(self, unmarked: Mapping[procfs.Identity, int]) -> None:
        """The processes without a mark that there are now, and their children; new ones are told."""
        for identity, child in unmarked.items():
            if identity not in self._unmarked:
                self._send(WATCH.pack(3, child, identity.pid, identity.start_ticks))
        self._unmarked = dict(unmarked)

    def set_deadline(self, slot: int, deadline: float) -> None:
        """Until when the child may run while we say nothing, CLOCK_BOOTTIME; 0: for ever. No system call."""
        if slot >= 0:
            self._table.set_deadline(slot, deadline)

    def has_killed(self, slot: int) -> bool:
        """Whether the guard killed the child of this slot."""
        return slot >= 0 and self._table.killed(slot)

    def _tell(self, child: int, ward: _Ward) -> None:
        if self._sock is None:
            return
        message = REGISTER.pack(1, ward.slot, child, ward.pid, ward.start_ticks)
        try:
            socket.send_fds(self._sock, [message], [ward.pidfd])
        except OSError:
            self._give_up("it does not listen")

    def _send(self, message: bytes) -> None:
        if self._sock is not None:
            try:
                self._sock.send(message)
            except OSError:
                self._give_up("it does not listen")

    # --- the process --------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        str(_MAIN),
                        str(theirs.fileno()),
                        str(self._table_fd),
                        str(os.getpid()),
                        self._owner,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._table_fd),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._process, self._sock = process, ours
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_death)
        self._loop.add_reader(ours.fileno(), self._on_readable)
        for child, ward in list(self._wards.items()):
            self._tell(child, ward)
        unmarked, self._unmarked = self._unmarked, {}
        self.watch(unmarked)

    def _on_readable(self) -> None:
        if self._sock is None:
            return
        try:
            said = self._sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._loop.remove_reader(self._sock.fileno())
        elif not self._ready.done():
            self._failures = 0
            self._ready.set_result(None)

    def _on_death(self) -> None:
        process = self._process
        if process is None or process.poll() is None:
            return
        self._forget_process()
        if self._closing:
            return
        delay_s = _RESTART_DELAYS_S[min(self._failures, len(_RESTART_DELAYS_S) - 1)]
        self._failures += 1
        _log.error("the guard ended (%s), starting another", process.returncode)
        self._restart = self._loop.call_later(delay_s, self._respawn)

    def _respawn(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            _log.error("the guard cannot be started: %s", error)
            self._failures += 1
            self._restart = self._loop.call_later(_RESTART_DELAYS_S[-1], self._respawn)

    def _give_up(self, why: str) -> None:
        """A guard that does not take messages guards nothing: end it, its death brings the next."""
        if self._process is not None and not self._closing:
            _log.error("the guard is replaced: %s", why)
            self._process.kill()

    def _close_socket(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _forget_process(self) -> None:
        self._close_socket()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._process = None
        if not self._gone.done() and self._closing:
            self._gone.set_result(None)

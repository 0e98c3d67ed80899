"""The harness's side of the sync points: meets every process that comes to a point, and holds those that it waits for.

    process at a point ──▶ question ──▶ is there a trap for it?  no ──▶ "continue", and it is written down
                                                                 yes ─▶ it stands still until its `Meeting` is answered

A process that stands at a point does nothing at all: killed there, it is killed exactly between what came before the
point and what comes after it. `shared/syncpoints.py` is the other side; the harness's own handlers speak the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from crashtests.processes import Process
from shared import syncpoints

__all__ = ["Crossing", "Meeting", "NotReached", "Rendezvous", "Trap"]

_QUESTION_LIMIT_S: Final = 5.0
_MAX_QUESTION_BYTES: Final = 1 << 16
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_BACKLOG: Final = 64


class NotReached(Exception):
    """Nobody came to the point in time: the scenario did not take place, and says nothing."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One visit of one process to one point. `visit` counts from 1 within that process."""

    process: str
    point: str
    visit: int
    pid: int
    ids: Mapping[str, Any] = field(default_factory=dict)


class Meeting:
    """A process that stands at a point. It goes on when it is answered, or when this is closed."""

    def __init__(self, crossing: Crossing, connection: socket.socket, process: Process) -> None:
        """Own the connection and the process's descriptor."""
        self.crossing = crossing
        self.process = process
        self._connection = connection

    def release(self) -> None:
        """Let it go on."""
        self._answer({"do": "continue"})

    def exit(self, code: int) -> None:
        """Let it end itself at once with this code."""
        self._answer({"do": "exit", "code": code})

    def fail(self, message: str) -> None:
        """Let the point raise."""
        self._answer({"do": "raise", "message": message})

    def pause(self, seconds: float) -> None:
        """Let it sleep there and go on."""
        self._answer({"do": "sleep", "seconds": seconds})

    def _answer(self, what: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(what).encode() + b"\n")
        self._connection.close()

    def close(self) -> None:
        """Let it go on, if it still stands there, and forget it."""
        self._connection.close()
        self.process.close()


class Trap:
    """Waits for the n-th crossing that fits."""

    def __init__(self, fits: Callable[[Crossing], bool], nth: int, name: str) -> None:
        """`nth` counts from 1, over all processes."""
        self.name = name
        self._fits = fits
        self._left = nth
        self._caught = threading.Event()
        self._meeting: Meeting | None = None

    def takes(self, crossing: Crossing) -> bool:
        """Count it; True where it is the one."""
        if self._left > 0 and self._fits(crossing):
            self._left -= 1
            return self._left == 0
        return False

    def wait_for_another(self) -> None:
        """Somebody else holds this one."""
        self._left = 1

    def catch(self, meeting: Meeting) -> None:
        """It has come."""
        self._meeting = meeting
        self._caught.set()

    @property
    def caught(self) -> bool:
        """Whether somebody stands here."""
        return self._caught.is_set()

    def wait(self, timeout_s: float) -> Meeting:
        """Wait for it. Raises `NotReached`."""
        if not self._caught.wait(timeout_s) or self._meeting is None:
            raise NotReached(f"nobody came to {self.name} within {timeout_s:g} s")
        return self._meeting


class Rendezvous:
    """Listens on a socket in a private folder and meets processes on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        """Listen in `folder`, whose path must be short enough for a socket."""
        self._path = str(folder / "sync")
        self._token = secrets.token_hex(16)
        self._write_proof()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self._path)
        self._server.listen(_BACKLOG)
        self._lock = threading.Lock()
        self._traps: list[Trap] = []
        self._held: list[Meeting] = []
        self._crossings: list[Crossing] = []
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def _write_proof(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(syncpoints.token_path(self._path), flags, 0o600)
        try:
            os.write(fd, self._token.encode())
        finally:
            os.close(fd)

    def environ(self, armed: Iterable[str] = ()) -> dict[str, str]:
        """The variables that switch the points on; `armed`: only these, the others cost nothing."""
        found = {syncpoints.SOCKET_VARIABLE: self._path, syncpoints.TOKEN_VARIABLE: self._token}
        if names := sorted(armed):
            found[syncpoints.ARMED_VARIABLE] = ",".join(names)
        return found

    def trap(self, *points: str, nth: int = 1, where: Callable[[Crossing], bool] | None = None) -> Trap:
        """Hold the n-th process that comes to one of the points (none: to any point) and that `where` accepts."""
        wanted = frozenset(points)

        def fits(crossing: Crossing) -> bool:
            return (not wanted or crossing.point in wanted) and (where is None or where(crossing))

        trap = Trap(fits, nth, " or ".join(points) or f"the {nth}. point")
        with self._lock:
            self._traps.append(trap)
        return trap

    def disarm(self) -> None:
        """Wait for nobody any more; who stands somewhere goes on standing."""
        with self._lock:
            self._traps.clear()

    @property
    def crossings(self) -> list[Crossing]:
        """Every visit so far, in order."""
        with self._lock:
            return list(self._crossings)

    def close(self) -> None:
        """Let everybody go on."""
        os.write(self._woken, b"x")
        self._thread.join(_QUESTION_LIMIT_S + 1.0)
        self._server.close()
        for meeting in self._held:
            meeting.close()
        os.close(self._wake)
        os.close(self._woken)
        for path in (self._path, syncpoints.token_path(self._path)):
            with contextlib.suppress(OSError):
                os.unlink(path)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._wake in ready:
                    return
                with contextlib.suppress(OSError):
                    self._meet(self._server.accept()[0])

    def _meet(self, connection: socket.socket) -> None:
        """Take one question; what is no question of ours is turned away, which means: go on."""
        connection.settimeout(_QUESTION_LIMIT_S)
        crossing = self._read(connection)
        if crossing is None:
            connection.close()
            return
        with self._lock:
            self._crossings.append(crossing)
            taken = [trap for trap in self._traps if trap.takes(crossing)]  # each of them counts it
            trap = taken[0] if taken else None
            if trap is not None:
                self._traps.remove(trap)
            for other in taken[1:]:
                other.wait_for_another()
        if trap is None:
            with contextlib.suppress(OSError):
                connection.sendall(b'{"do": "continue"}\n')
            connection.close()
            return
        try:
            meeting = Meeting(crossing, connection, Process(crossing.pid))
        except ProcessLookupError:  # it was killed on its way here
            connection.close()
            return
        self._held.append(meeting)
        trap.catch(meeting)

    def _read(self, connection: socket.socket) -> Crossing | None:
        data = b""
        try:
            pid, _, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            while not data.endswith(b"\n") and len(data) < _MAX_QUESTION_BYTES:
                more = connection.recv(_MAX_QUESTION_BYTES)
                if not more:
                    return None
                data += more
            question = json.loads(data)
            if not isinstance(question, dict) or question.get("token") != self._token:
                return None
            return Crossing(
                str(question["process"]), str(question["point"]), int(question["hit"]), pid, question.get("ids") or {}
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

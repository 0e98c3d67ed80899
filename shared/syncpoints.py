"""Sync points: named places in the shell where a test can hold a whole process, and kill it while it stands there.

A point that is off costs the call of an empty function. They are on only when the environment names a socket AND a
token, and a private file of ours beside the socket holds the same token: a variable that leaked into production does
nothing. What `hit` does when on:

    process                                   harness (listens on the socket)
    connect, one JSON line  ────────────────▶ {"process", "point", "hit", "pid", "ids", "token"}
    stands still            ◀──────────────── one JSON line, when it likes:
                                              {"do": "continue"} | {"do": "exit", "code": n}
                                              | {"do": "raise", "message": text} | {"do": "sleep", "seconds": x}

`hit` counts the visits of this process to this point, from 1. A harness that is gone means "continue".
Call `syncpoints.hit(...)` through the module, or bind it after `switch_on_if_asked`.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = [
    "ARMED_VARIABLE",
    "POINTS",
    "SOCKET_VARIABLE",
    "TOKEN_VARIABLE",
    "SyncPointError",
    "hit",
    "switch_off",
    "switch_on_if_asked",
    "token_path",
]

SOCKET_VARIABLE: Final = "PGMQ_SUPERVISOR_SYNC"
TOKEN_VARIABLE: Final = "PGMQ_SUPERVISOR_SYNC_TOKEN"  # noqa: S105 - the name of a variable
ARMED_VARIABLE: Final = "PGMQ_SUPERVISOR_SYNC_POINTS"  # optional: only these, separated by commas

# The registry: `<process>.<area>.<moment>`. A test asserts that each is hit.
POINTS: Final = frozenset(
    {
        "child.boot.ready",
        "child.dispatch.received",
        "child.handler.before",
        "child.handler.after",
        "child.result.before_send",
        "child.result.after_send",
        "child.tx.before_claim",
        "child.tx.after_claim",
        "child.tx.before_commit_request",
        "child.tx.before_commit",
        "child.tx.after_commit",
        "parent.claim.before",
        "parent.claim.after",
        "parent.dispatch.before",
        "parent.dispatch.after",
        "parent.settle.before",
        "parent.settle.after",
        "parent.renew.before",
        "parent.renew.after",
        "parent.verdict.before",
        "parent.verdict.after",
        "parent.death.before_settle",
        "parent.reckon.before",
        "parent.reckon.after",
    }
)

_MIN_TOKEN_LENGTH: Final = 32
_MAX_ANSWER_BYTES: Final = 4096

Ids = Mapping[str, int | str]


class SyncPointError(RuntimeError):
    """A test asked for a failure at this point."""


def _off(point: str, ids: Ids | None = None) -> None:
    """Do nothing."""


# The one switch. Swapped as a whole, so that a point that is off asks nothing.
hit: Callable[..., None] = _off


def switch_on_if_asked(process: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Switch the points of this process on if the environment asks and proves it. `process`: "child", "parent"."""
    global hit  # noqa: PLW0603 - see above
    path, token = environ.get(SOCKET_VARIABLE), environ.get(TOKEN_VARIABLE)
    if not path or not token or len(token) < _MIN_TOKEN_LENGTH or _read_token(token_path(path)) != token:
        return False
    armed = frozenset(name.strip() for name in environ.get(ARMED_VARIABLE, "").split(",") if name.strip())
    hit = _Meeting(process, path, token, armed or POINTS).hit
    print(
        f"pgmq-supervisor: SYNC POINTS ARE ON in {process} {os.getpid()}: this is a test", file=sys.stderr, flush=True
    )
    return True


def switch_off() -> None:
    """Back to nothing; for tests within one process."""
    global hit  # noqa: PLW0603 - see switch_on_if_asked
    hit = _off


def token_path(socket_path: str) -> str:
    """Where the proof lies: beside the socket, ours, readable by nobody else."""
    return socket_path + ".token"


def _read_token(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return os.read(fd, 256).decode("ascii", "replace").strip() if private else None
    finally:
        os.close(fd)


class _Meeting:
    """Meets the harness at each point that is armed."""

    def __init__(self, process: str, path: str, token: str, armed: frozenset[str]) -> None:
        unknown = armed - POINTS
        if unknown:
            raise ValueError(f"no such sync points: {', '.join(sorted(unknown))}")
        self._process = process
        self._path = path
        self._token = token
        self._armed = armed
        self._visits: dict[str, int] = {}

    def hit(self, point: str, ids: Ids | None = None) -> None:
        """Stand still until the harness answers."""
        assert point in POINTS, f"{point} is not in the registry"
        visit = self._visits[point] = self._visits.get(point, 0) + 1
        if point in self._armed:
            self._obey(self._meet(point, visit, ids))

    def _meet(self, point: str, visit: int, ids: Ids | None) -> dict[str, Any]:
        question = {
            "process": self._process,
            "point": point,
            "hit": visit,
            "pid": os.getpid(),
            "ids": dict(ids or {}),
            "token": self._token,
        }
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as meeting:
                meeting.connect(self._path)
                meeting.sendall(json.dumps(question).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER_BYTES:
                    if not (more := meeting.recv(_MAX_ANSWER_BYTES)):
                        break
                    answer += more
            parsed = json.loads(answer)
        except (OSError, ValueError):
            return {}
        return parsed if isinstance(parsed, dict) else {}

    def _obey(self, answer: dict[str, Any]) -> None:
        match answer.get("do"):
            case "exit":
                os._exit(int(answer.get("code", 1)))
            case "raise":
                raise SyncPointError(str(answer.get("message", "raised at a sync point")))
            case "sleep":
                time.sleep(float(answer.get("seconds", 0)))
            case _:
                return

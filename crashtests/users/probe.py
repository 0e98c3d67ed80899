"""The harness's side of a probe: a user's function that counts effects, asked in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self, TextIO

__all__ = ["Counts", "Probe", "ProbeFailed", "call_setup"]

_MAIN: Final = Path(__file__).with_name("probe_main.py")
_ANSWER_S: Final = 30.0
_OF_THE_MESSAGE: Final = frozenset({"body", "message", "operation_id", "msg_id"})
_OF_THE_PLACE: Final = frozenset({"dsn", "connection", "conn"})

Counts = Mapping[str, int]


class ProbeFailed(Exception):
    """It raised, returned what is no count, or did not answer in time."""


class Probe:
    """Asks; safe from several threads, one question at a time."""

    def __init__(self, reference: str, app_dir: Path) -> None:
        """Start it. Raises `ProbeFailed` where it cannot be imported."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_MAIN), reference, str(app_dir), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _is_real(sys.stderr) else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=app_dir,
            )
        ours.settimeout(_ANSWER_S)
        self._socket = ours
        self._lines = ours.makefile("rwb")
        self._lock = threading.Lock()
        try:
            self.wants = frozenset(self._answer()["wants"])
        except BaseException:
            self.close()
            raise

    @property
    def counts_one_message(self) -> bool:
        """Whether it counts the effects of one message, and not all that there are: then runs may be side by side."""
        return bool(self.wants & _OF_THE_MESSAGE or self.wants - _OF_THE_PLACE)

    def ask(self, *, body: object, operation_id: str, msg_id: int, dsn: str) -> Counts:
        """Count. Raises `ProbeFailed`."""
        question = {"body": body, "operation_id": operation_id, "msg_id": msg_id, "dsn": dsn}
        with self._lock:
            try:
                self._lines.write(json.dumps(question).encode() + b"\n")
                self._lines.flush()
            except OSError as error:
                raise ProbeFailed(f"the probe's process has ended: {error}") from error
            return {str(name): int(count) for name, count in self._answer()["counts"].items()}

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise ProbeFailed(f"the probe did not answer within {_ANSWER_S:g} s") from error
        if not line:
            raise ProbeFailed("the probe's process has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProbeFailed(str(answer["error"]).strip())
        return answer

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        """It runs already."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End it."""
        self.close()


def call_setup(reference: str, app_dir: Path, dsn: str) -> None:
    """Call a user's function once with a database. Raises `ProbeFailed`."""
    code = "import sys, importlib; sys.path[0] = sys.argv[2]; m, _, f = sys.argv[1].partition(':')\n"
    code += "getattr(importlib.import_module(m), f)(sys.argv[3])"
    command = [sys.executable, "-c", code, reference, os.fspath(app_dir), dsn]
    done = subprocess.run(command, cwd=app_dir, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise ProbeFailed(f"--setup {reference} failed:\n{done.stderr.strip()}")


def _is_real(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False

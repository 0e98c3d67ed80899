"""Stands around a user's handler so that it can be held before any of its lines. Imports nothing of ours.

`CRASHTESTS_HANDLER` names the handler, `CRASHTESTS_APP` the folder whose lines count. The file `CRASHTESTS_LINE` says
before which line of the next call it stands still, counted from 1 in the order in which they run; 0: before none, but
the lines that were run are told at the end; -1: nothing is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

APP = os.path.realpath(os.environ["CRASHTESTS_APP"]) + os.sep
FOREIGN = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
MOST_PLACES = 2000


def load(reference: str) -> Callable[..., Any]:
    """The handler itself."""
    module, _, path = reference.partition(":")
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    found: Callable[..., Any] = target
    return found


def wanted_line() -> int:
    """What the file says now."""
    with open(os.environ["CRASHTESTS_LINE"], encoding="ascii") as file:
        return int(file.read())


def meet(point: str, **ids: object) -> None:
    """Stand still until the harness lets us go on: the same words as at a sync point."""
    question = {"process": "handler", "point": point, "hit": 1, "pid": os.getpid(), "ids": ids}
    question["token"] = os.environ["PGMQ_SUPERVISOR_SYNC_TOKEN"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as meeting:
        meeting.connect(os.environ["PGMQ_SUPERVISOR_SYNC"])
        meeting.sendall(json.dumps(question).encode() + b"\n")
        meeting.recv(4096)


@functools.cache
def counts(filename: str) -> bool:
    """Whether the lines of a file are the application's own."""
    path = os.path.realpath(filename)
    return path.startswith(APP) and not any(part in path for part in FOREIGN)


class Lines:
    """Counts the application's lines while the handler runs on this thread."""

    def __init__(self) -> None:
        """Ask what is wanted."""
        self.wanted = wanted_line()
        self.count = 0
        self.places: list[str] = []

    def enter(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        """A call: follow it where it is the application's."""
        return self.line if event == "call" and counts(frame.f_code.co_filename) else None

    def line(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        """A line is about to run."""
        if event == "line":
            self.count += 1
            place = f"{os.path.realpath(frame.f_code.co_filename)[len(APP) :]}:{frame.f_lineno}"
            if len(self.places) < MOST_PLACES:
                self.places.append(place)
            if self.count == self.wanted:
                meet("handler.line", place=place, count=self.count)
        return self.line

    def __enter__(self) -> None:
        """Begin."""
        if self.wanted >= 0:
            sys.settrace(self.enter)

    def __exit__(self, *_error: object) -> None:
        """End, and tell what was run."""
        if self.wanted >= 0:
            sys.settrace(None)
        if self.wanted == 0:
            meet("handler.lines", places=self.places)


def wrap(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The same handler, plain or async, with a look at its lines."""
    if inspect.iscoroutinefunction(handler):

        async def call_later(*arguments: Any) -> Any:
            with Lines():
                return await handler(*arguments)

        return call_later

    def call(*arguments: Any) -> Any:
        with Lines():
            return handler(*arguments)

    return call


handle = wrap(load(os.environ["CRASHTESTS_HANDLER"]))

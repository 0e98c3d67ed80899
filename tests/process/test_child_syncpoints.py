"""A child that stands still at its sync points, and may be killed there."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import syncpoints
from shared.wire.frames import Kind
from shared.wire.startmark import read_mark
from tests.support.childharness import DEADLINE_S, ChildGone, ChildHarness

REGULAR = [
    "child.boot.ready",
    "child.dispatch.received",
    "child.handler.before",
    "child.handler.after",
    "child.result.before_send",
    "child.result.after_send",
]


class Meeting:
    """One child that stands at a point."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(DEADLINE_S)
        with connection.makefile("rb") as lines:
            self.question: dict[str, Any] = json.loads(lines.readline())

    def answer(self, **what: Any) -> None:
        """Let it go on as told."""
        self._connection.sendall(json.dumps(what).encode() + b"\n")
        self.close()

    def close(self) -> None:
        """Stop listening to it."""
        self._connection.close()


class Points:
    """The harness's side."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "sync")
        self._met: list[Meeting] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(DEADLINE_S)
        self._server.bind(self._path)
        self._server.listen()
        token = secrets.token_hex(16)
        proof = Path(syncpoints.token_path(self._path))
        proof.touch(mode=0o600)
        proof.write_text(token)
        self.env = {syncpoints.SOCKET_VARIABLE: self._path, syncpoints.TOKEN_VARIABLE: token}

    def meet(self) -> Meeting:
        """Wait for the next child that stands still."""
        self._met.append(Meeting(self._server.accept()[0]))
        return self._met[-1]

    def close(self) -> None:
        """Nobody is met any more."""
        for meeting in self._met:
            meeting.close()
        self._server.close()


@pytest.fixture
def points(tmp_path: Path) -> Iterator[Points]:
    """A socket and its proof."""
    harness = Points(tmp_path)
    yield harness
    harness.close()


def test_every_point_of_the_regular_mode_is_hit_in_order(points: Points) -> None:
    """One message passes all of them."""
    with ChildHarness("plain:succeed", env=points.env, wait_ready=False) as child:
        seen = []
        for point in REGULAR:
            meeting = points.meet()
            seen.append(meeting.question["point"])
            assert (meeting.question["pid"], meeting.question["process"]) == (child.pid, "child")
            meeting.answer(do="continue")
            if point == "child.boot.ready":
                child.expect(Kind.READY)
                child.dispatch()
        assert seen == REGULAR
        child.expect(Kind.SUCCESS)
        assert "SYNC POINTS ARE ON" in child.output()


@pytest.mark.parametrize(
    ("point", "begun", "frames"),
    [
        ("child.dispatch.received", False, []),
        ("child.handler.before", True, []),
        ("child.result.before_send", True, []),
        ("child.result.after_send", True, [Kind.SUCCESS]),
    ],
)
def test_a_child_killed_at_a_point_has_sent_exactly_what_came_before(
    points: Points, point: str, begun: bool, frames: list[Kind]
) -> None:
    """The kill hits a process that stands there."""
    env = {**points.env, syncpoints.ARMED_VARIABLE: point}
    with ChildHarness("plain:succeed", env=env) as child:
        seq = child.dispatch()
        assert points.meet().question["point"] == point
        child.process.kill()
        child.wait()
        assert (read_mark(child.stack_fd) == seq) is begun
        assert [child.receive().kind for _ in frames] == frames
        with pytest.raises(ChildGone):
            child.receive()


def test_a_point_can_end_the_child(points: Points) -> None:
    """The answer `exit`."""
    with ChildHarness("plain:succeed", env={**points.env, syncpoints.ARMED_VARIABLE: "child.handler.after"}) as child:
        child.dispatch()
        points.meet().answer(do="exit", code=5)
        assert child.wait() == 5


def test_the_variable_alone_does_nothing(tmp_path: Path) -> None:
    """Without the proof a child starts as ever, and silently."""
    env = {syncpoints.SOCKET_VARIABLE: str(tmp_path / "sync"), syncpoints.TOKEN_VARIABLE: "0" * 32}
    with ChildHarness("plain:succeed", env=env) as child:
        assert child.run()["kind"] == "success"
        assert child.output() == ""

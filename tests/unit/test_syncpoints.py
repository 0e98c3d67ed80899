"""Sync points: off by default, on only with proof, and then the whole process stands still."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import syncpoints

TOKEN = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    syncpoints.switch_off()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment that asks, with its proof."""
    path = str(tmp_path / "sync")
    proof = Path(syncpoints.token_path(path))
    proof.touch(mode=0o600)
    proof.write_text(TOKEN)
    return {syncpoints.SOCKET_VARIABLE: path, syncpoints.TOKEN_VARIABLE: TOKEN}


class Harness:
    """Answers each meeting from a script."""

    def __init__(self, path: str, answers: list[dict[str, object]]) -> None:
        self.questions: list[dict[str, object]] = []
        self._answers = answers
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._server.accept()
            with connection, connection.makefile("rwb") as file:
                self.questions.append(json.loads(file.readline()))
                file.write(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Wait for the script's end."""
        self._thread.join(10)
        self._server.close()


def test_off_a_point_costs_next_to_nothing() -> None:
    """Well below a microsecond."""
    rounds = 100_000
    before = time.perf_counter()
    for _ in range(rounds):
        syncpoints.hit("child.handler.before")
    assert (time.perf_counter() - before) / rounds < 1e-6


BROKEN = ["no socket", "no token", "short token", "other token", "readable", "missing", "link"]


@pytest.mark.parametrize("broken", BROKEN)
def test_without_proof_they_stay_off(environ: dict[str, str], broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    """No variable alone switches them on."""
    proof = Path(syncpoints.token_path(environ[syncpoints.SOCKET_VARIABLE]))
    match broken:
        case "no socket":
            del environ[syncpoints.SOCKET_VARIABLE]
        case "no token":
            del environ[syncpoints.TOKEN_VARIABLE]
        case "short token":
            environ[syncpoints.TOKEN_VARIABLE] = "short"
            proof.write_text("short")
        case "other token":
            proof.write_text("f" * 32)
        case "readable":
            proof.chmod(0o644)
        case "missing":
            proof.unlink()
        case "link":
            proof.rename(proof.with_suffix(".real"))
            proof.symlink_to(proof.with_suffix(".real"))
    assert not syncpoints.switch_on_if_asked("child", environ)
    syncpoints.hit("child.handler.before")
    assert capfd.readouterr().err == ""


def test_on_it_says_so_meets_and_counts(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Each visit is a meeting with process, point, number of the visit, pid and ids."""
    harness = Harness(environ[syncpoints.SOCKET_VARIABLE], [{"do": "continue"}, {"do": "sleep", "seconds": 0.01}])
    assert syncpoints.switch_on_if_asked("parent", environ)
    syncpoints.hit("parent.claim.before", {"queue": "orders"})
    syncpoints.hit("parent.claim.before")
    harness.close()
    assert "SYNC POINTS ARE ON" in capfd.readouterr().err
    base = {"process": "parent", "point": "parent.claim.before", "pid": os.getpid(), "token": TOKEN}
    assert harness.questions == [
        {**base, "hit": 1, "ids": {"queue": "orders"}},
        {**base, "hit": 2, "ids": {}},
    ]


def test_a_test_may_ask_for_a_failure(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """`raise` raises at the point."""
    harness = Harness(environ[syncpoints.SOCKET_VARIABLE], [{"do": "raise", "message": "now"}])
    syncpoints.switch_on_if_asked("parent", environ)
    with pytest.raises(syncpoints.SyncPointError, match="now"):
        syncpoints.hit("parent.settle.before")
    harness.close()


def test_only_armed_points_meet(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """The others are counted and cost no meeting."""
    environ[syncpoints.ARMED_VARIABLE] = "parent.renew.before, parent.renew.after"
    harness = Harness(environ[syncpoints.SOCKET_VARIABLE], [{"do": "continue"}])
    syncpoints.switch_on_if_asked("parent", environ)
    syncpoints.hit("parent.claim.before")
    syncpoints.hit("parent.renew.after")
    harness.close()
    assert [question["point"] for question in harness.questions] == ["parent.renew.after"]


def test_unknown_points_are_refused(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """A typo in a test or in the code does not pass silently."""
    syncpoints.switch_on_if_asked("parent", environ)
    with pytest.raises(AssertionError, match="registry"):
        syncpoints.hit("parent.claim.befroe")
    environ[syncpoints.ARMED_VARIABLE] = "parent.claim.befroe"
    with pytest.raises(ValueError, match="befroe"):
        syncpoints.switch_on_if_asked("parent", environ)


def test_a_harness_that_is_gone_means_continue(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody listens: the process goes on."""
    syncpoints.switch_on_if_asked("parent", environ)
    syncpoints.hit("parent.claim.before")


def test_names_are_process_area_moment() -> None:
    """The registry keeps its form."""
    for name in syncpoints.POINTS:
        process, area, moment = name.split(".")
        assert process in {"child", "parent"}
        assert area
        assert moment

"""`status`, `top`, `pause`, `resume`, `cancel` against a server on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.config.sources import Overrides
from supervisor.control import commands
from supervisor.control.actions import Result
from supervisor.control.binding import bind_control_socket
from supervisor.control.live import duration, render
from supervisor.control.server import ControlServer
from tests.support.actions import RecordingActions

CHILD = {
    "child": 1, "slot": 0, "incarnation": 1, "role": "active", "state": "busy", "pid": 7, "age_s": 50.0,
    "messages": 3, "msg_id": 5, "attempt": 2, "running_s": 12.0, "stop_reason": None, "progress": "half \x1b[31m",
    "memory_bytes": 1 << 20,
}  # fmt: skip
QUEUE = {
    "name": "orders", "concurrency": 1, "paused": False, "parked": None, "not_ready_because": None, "pending": 0,
    "visible": 100, "visible_at_limit": True, "oldest_visible_s": 4000.0, "children": [CHILD],
    "counters": {"succeeded": 10, "retried": 1, "dead_lettered": 0, "deaths": 1},
}  # fmt: skip
DEATH = {
    "at": 0.0, "queue": "orders", "slot": 0, "pid": 6, "cause": "signal", "signal": "SIGSEGV", "exit_code": None,
    "msg_id": 4, "attempt": 1, "charged": True, "max_rss_kb": 2048, "output_tail": "line\nlast line\n",
}  # fmt: skip
DOCUMENT: dict[str, object] = {
    "supervisor": "one", "host": "h", "version": "1", "pid": 1, "time": 100.0, "state": "running", "uptime_s": 5.0,
    "reloading": False, "live": True, "ready": True, "reasons": [], "queues": {"orders": QUEUE},
    "recent_deaths": [DEATH],
}  # fmt: skip


class Supervisor(RecordingActions):
    """Answers as a supervisor that has no rights to write the pause."""

    async def pause(self, queue: str) -> Result:
        await super().pause(queue)
        return {"queue": queue, "paused": True, "persisted": False, "note": "only in this supervisor: no rights"}


@pytest.fixture
def actions() -> RecordingActions:
    """The seam."""
    actions = Supervisor()
    actions.document = DOCUMENT
    return actions


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: RecordingActions) -> AsyncIterator[None]:
    """A supervisor of the configuration in the working directory."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "supervisor.toml"
    config.write_text("broken while somebody edits it [")
    server = ControlServer(
        bind_control_socket(configured=None, config_path=config, environ=os.environ), actions, on_refused=lambda _: None
    )
    server.start()
    yield
    await server.close()


class Runner:
    """Runs commands beside the loop on which the server answers."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, name: str, overrides: Overrides | None = None, **fields: object) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        command = getattr(commands, name)
        code: int = await asyncio.to_thread(command, overrides or Overrides(), **fields)
        shown = self._capsys.readouterr()
        return code, shown.out, shown.err


@pytest.fixture
def run(running: None, capsys: pytest.CaptureFixture[str]) -> Runner:
    """A way to run commands."""
    return Runner(capsys)


async def test_status_as_json_is_the_document(run: Runner) -> None:
    """Machines get everything; a broken configuration file does not matter."""
    code, out, _ = await run("status", as_json=True)
    assert (code, json.loads(out)) == (0, DOCUMENT)


@pytest.mark.parametrize("command", ["status", "top"])
async def test_without_a_terminal_everything_is_shown_once(run: Runner, command: str) -> None:
    """Queue, child, what it runs and for how long, recent deaths with cause; no control characters."""
    code, out, _ = await run(command)
    assert code == 0
    for text in ("orders", "100+", "66m40s", "12s", "SIGSEGV", "last line", "1MB"):
        assert text in out
    assert "\x1b" not in out


async def test_a_local_pause_says_so(run: Runner, actions: RecordingActions) -> None:
    """Who pauses learns that other supervisors go on."""
    code, out, err = await run("pause", queue="orders")
    assert (code, out) == (0, "orders: paused\n")
    assert "only in this supervisor" in err
    assert actions.asked == [("pause", "orders")]


async def test_actions_can_answer_in_json(run: Runner) -> None:
    """All of them."""
    for command, fields in (("pause", {}), ("resume", {}), ("cancel", {"msg_id": 7})):
        code, out, _ = await run(command, queue="orders", as_json=True, **fields)
        assert code == 0
        assert isinstance(json.loads(out), dict)


async def test_a_refusal_is_one_line_and_exit_code_1(run: Runner) -> None:
    """No traceback."""
    assert await run("resume", queue="unknown") == (1, "", "error: no such queue\n")


async def test_an_impossible_id_is_exit_code_2(run: Runner) -> None:
    """Usage."""
    code, _, err = await run("cancel", queue="orders", msg_id=-1)
    assert code == 2
    assert "message id" in err


async def test_nobody_runs_is_exit_code_1(run: Runner, tmp_path: Path) -> None:
    """Another configuration's supervisor is not asked instead."""
    other = tmp_path / "other.toml"
    other.touch()
    code, _, err = await run("status", Overrides(config=str(other)))
    assert code == 1
    assert "no running supervisor" in err


async def test_a_configuration_that_is_not_there_is_exit_code_2(run: Runner) -> None:
    """A typo in --config must not lead to another supervisor."""
    code, _, err = await run("status", Overrides(config="nowhere.toml"))
    assert code == 2
    assert "nowhere.toml" in err


async def test_a_socket_can_be_named(run: Runner, tmp_path: Path) -> None:
    """--socket wins over everything."""
    (path,) = (tmp_path / "runtime").glob("*.sock")
    code, _, _ = await run("status", Overrides(socket=str(path), config="nowhere.toml"))
    assert code == 2
    code, _, _ = await run("status", Overrides(socket=str(path)))
    assert code == 0


def test_rates_are_differences_of_two_documents() -> None:
    """`top` shows messages a second."""
    from rich.console import Console

    later = json.loads(json.dumps(DOCUMENT))
    later["time"] = 102.0
    later["queues"]["orders"]["counters"]["succeeded"] = 60
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    console.print(render(later, DOCUMENT))
    console.file.close()
    assert " 25 " in console.export_text()


def test_durations_are_short() -> None:
    """As one reads them."""
    texts = [duration(seconds) for seconds in (None, 0.04, 59, 130, 7300, 200_000)]
    assert texts == ["-", "0.0s", "59s", "2m10s", "2h01m", "2d7h"]

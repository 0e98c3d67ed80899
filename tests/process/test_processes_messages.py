"""The ordinary way of a message through a real child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import uvloop

from supervisor.core.commands import SendExit
from supervisor.core.types import SUCCESS, OutcomeKind
from tests.support.processes import spec_for, world

Run = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a coroutine on either loop: descriptors of every kind must be watchable by both."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


def test_a_message_runs_and_succeeds(tmp_path: Path, run: Run) -> None:
    """Dispatch leads to MessageStarted and MessageFinished, and EXIT to an end with code 0."""

    async def main() -> None:
        async with world(spec_for(tmp_path, "def handle(message): print('got', message.body)")) as it:
            child = await it.ready()
            for number in range(3):
                claim = it.dispatch(child, str(number).encode())
                assert await it.finished(claim) == SUCCESS
                assert it.output_of(claim) == [f"got {number}"]
            it.processes.send_exit(SendExit(child))
            facts = await it.died(child)
            assert (facts.exit_code, facts.signal) == (0, None)

    run(main())


def test_a_failure_comes_with_its_error(tmp_path: Path, run: Run) -> None:
    """An exception becomes an outcome with type, text and traceback."""

    async def main() -> None:
        async with world(spec_for(tmp_path, "def handle(message): raise ValueError('no')")) as it:
            child = await it.ready()
            outcome = await it.finished(it.dispatch(child))
            assert outcome.kind is OutcomeKind.ERROR
            assert outcome.error is not None
            assert (outcome.error.type, outcome.error.message) == ("ValueError", "no")

    run(main())


def test_a_sigkill_is_told_with_its_name(tmp_path: Path, run: Run) -> None:
    """The message in hand dies with its child, and the facts say how."""

    async def main() -> None:
        source = "import os\ndef handle(message):\n    print('last words')\n    os.kill(os.getpid(), 9)"
        async with world(spec_for(tmp_path, source)) as it:
            child = await it.ready()
            claim = it.dispatch(child)
            facts = await it.died(child)
            assert (facts.exit_code, facts.signal, facts.oom) == (None, "SIGKILL", False)
            assert "last words" in facts.output_tail
            assert facts.max_rss_kb > 1000
            assert it.outcome(claim) is None

    run(main())


def test_figures_of_a_child(tmp_path: Path, run: Run) -> None:
    """Displays get pid, memory, CPU and age of the living, and None of others."""

    async def main() -> None:
        async with world(spec_for(tmp_path, "def handle(message): ...")) as it:
            child = await it.ready()
            status = it.processes.status(child)
            assert status is not None
            assert status.pid == it.pids[child]
            assert status.rss_bytes > 1 << 20
            assert 0 <= status.cpu_s < 10
            assert 0 < status.uptime_s < 20
            it.kill(child)
            await it.died(child)
            assert it.processes.status(child) is None

    run(main())

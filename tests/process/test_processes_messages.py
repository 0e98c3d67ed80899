"""The ordinary way of a message through a real child."""

from __future__ import annotations

from pathlib import Path

from supervisor.core.commands import SendExit
from supervisor.core.types import SUCCESS, OutcomeKind
from tests.support.processes import spec_for, world


async def test_a_message_runs_and_succeeds(tmp_path: Path) -> None:
    """Dispatch leads to MessageStarted and MessageFinished, and EXIT to an end with code 0."""
    async with world(spec_for(tmp_path, "def handle(message): print('got', message.body)")) as it:
        child = await it.ready()
        for number in range(3):
            claim = it.dispatch(child, str(number).encode())
            assert await it.finished(claim) == SUCCESS
            assert it.output_of(claim) == [f"got {number}"]
        it.processes.send_exit(SendExit(child))
        facts = await it.died(child)
        assert (facts.exit_code, facts.signal) == (0, None)


async def test_a_failure_comes_with_its_error(tmp_path: Path) -> None:
    """An exception becomes an outcome with type, text and traceback."""
    async with world(spec_for(tmp_path, "def handle(message): raise ValueError('no')")) as it:
        child = await it.ready()
        outcome = await it.finished(it.dispatch(child))
        assert outcome.kind is OutcomeKind.ERROR
        assert outcome.error is not None
        assert (outcome.error.type, outcome.error.message) == ("ValueError", "no")


async def test_a_sigkill_is_told_with_its_name(tmp_path: Path) -> None:
    """The message in hand dies with its child, and the facts say how."""
    source = "import os\ndef handle(message):\n    print('last words')\n    os.kill(os.getpid(), 9)"
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        facts = await it.died(child)
        assert (facts.exit_code, facts.signal, facts.oom) == (None, "SIGKILL", False)
        assert "last words" in facts.output_tail
        assert facts.max_rss_kb > 1000
        assert it.outcome(claim) is None

"""What stands before the service: configuration, handlers, database; and after it: the exit code.

Nothing is claimed before all of this has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from shared.errors import ConfigurationError
from supervisor.cli.failures import ExitCode, say, warn
from supervisor.cli.handlers import HandlerReport, Verdict, memory_complaints, try_handlers
from supervisor.cli.opening import connect, resolved
from supervisor.cli.server import look_at_server, refuse_unusable
from supervisor.config import DEFAULT_FILE, Config, Overrides, load

__all__ = ["run_supervisor"]

_IMPORT_PATIENCE_S = 10.0  # then the start goes on: a child has its own, longer deadline for READY


class _StoppedEarly(BaseException):
    """TERM or INT before the service was there: nothing is claimed, nothing has to be drained."""


def run_supervisor(overrides: Overrides) -> int:
    """Run until told to stop; gives the exit code. Raises our errors for what cannot start."""
    _refuse_nothing(overrides)
    try:
        with _early_signals() as refuse_if_stopped:
            config = load(overrides, needs_queues=True)
            _refuse_handlers(config, try_handlers(config, timeout_s=_IMPORT_PATIENCE_S))
            with resolved(config) as found:
                with connect(found) as connection:
                    facts = look_at_server(connection)
                refuse_unusable(found, facts)
                from supervisor.service import run_service  # noqa: PLC0415 - heavy, and not needed to refuse

                refuse_if_stopped()
                return _run(run_service(found))
    except _StoppedEarly:
        say("stopped before anything was started")
        return ExitCode.CLEAN


def _refuse_nothing(overrides: Overrides) -> None:
    """Explain a bare start: neither a file nor a queue."""
    import os  # noqa: PLC0415 - only here

    named = overrides.config is not None or overrides.queues
    by_environment = any(name.upper().startswith("SUPERVISOR_QUEUES__") for name in os.environ)
    if named or by_environment or Path(DEFAULT_FILE).exists():
        return
    raise ConfigurationError(
        f"there is nothing to run: no ./{DEFAULT_FILE} here, no --config, and no --queue",
        remedy="write a supervisor.toml (docs/examples/supervisor.toml is one to start from), or try\n"
        "  pgmq-supervisor run --dsn embedded --queue orders=tasks:handle     one handler, a database of its own\n"
        "  pgmq-supervisor demo                                               a tour\n"
        "  pgmq-supervisor --help                                             all commands",
    )


def _refuse_handlers(config: Config, reports: list[HandlerReport]) -> None:
    """A handler that can never work is a fault of the configuration; one whose import fails may heal."""
    unusable = [report for report in reports if report.verdict is Verdict.UNUSABLE]
    complaints = [(", ".join(report.queues), report.reason) for report in unusable]
    complaints += memory_complaints(config, reports)
    if complaints:
        lines = "\n".join(f"  queue {queue}: {reason}" for queue, reason in complaints)
        raise ConfigurationError(
            f"handlers that cannot work, nothing was started\n{lines}",
            remedy='correct handler = "package.module:function", or --app-dir: modules are imported from there',
        )
    for report in reports:
        if report.verdict is not Verdict.GOOD:
            warn(f"queue {', '.join(report.queues)}: {report.reason}; the others go on, this one is tried again")


def _run(service: Coroutine[Any, Any, int]) -> int:
    """Run the service on uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(service)
    finally:
        # The loop has put the defaults back. What is left is short and bounded, and nothing must cut it off.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, _ignore)


def _ignore(signum: int, frame: FrameType | None) -> None:
    del signum, frame


@contextlib.contextmanager
def _early_signals() -> Iterator[Callable[[], None]]:
    """Before the service TERM and INT end the start cleanly, HUP and USR1 do nothing; afterwards none does anything.

    Gives a function that ends the start if it was told to and somebody has swallowed that.
    """
    told = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal told
        del signum, frame
        if not told:
            told = True
            raise _StoppedEarly

    def refuse_if_told() -> None:
        if told:
            raise _StoppedEarly

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: _ignore, signal.SIGUSR1: _ignore}
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    try:
        yield refuse_if_told
    finally:
        for signum in handlers:
            signal.signal(signum, _ignore)

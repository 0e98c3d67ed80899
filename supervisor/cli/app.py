"""The whole command line, assembled."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

from shared.errors import SupervisorError
from supervisor.cli.arguments import arrange
from supervisor.cli.commands import check, control, demo, dlq, init, queues, run, send
from supervisor.cli.failures import exit_code_of, report

__all__ = ["build", "run_command_line"]

_PROGRAM = "pgmq-supervisor"
_EPILOG = (
    "Exit codes: 0 clean stop; 1 failed; 2 usage, configuration or a handler that cannot work; "
    "3 stopped, but children had to be killed."
)


def build() -> typer.Typer:
    """Assemble the application. Plain help texts: they are the same on a terminal, in a pipe and in a log."""
    app = typer.Typer(
        name=_PROGRAM,
        help="Crash isolation for work on a PostgreSQL (PGMQ) queue. Without a command: run.",
        epilog=_EPILOG,
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_top)
    for module in (run, demo, check, init, send, queues, dlq, control):
        module.register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"{_PROGRAM} {version(_PROGRAM)}")
        except PackageNotFoundError:
            typer.echo(f"{_PROGRAM} (not installed)")
        raise typer.Exit


def _top(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run_command_line(arguments: Sequence[str]) -> None:
    """Run one command and exit. Expected errors become one message; anything else is a fault of ours, and shows."""
    command = cast("Any", get_command(build()))
    try:
        command.main(args=arrange(arguments, command.commands, "run"), prog_name=_PROGRAM)
    except SupervisorError as error:
        report(error)
        sys.exit(exit_code_of(error))

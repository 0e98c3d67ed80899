"""`run`: the supervisor itself."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.arguments import AppDir, ConfigFile, Dsn, Queues, Socket

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    config: ConfigFile = None,
    dsn: Dsn = None,
    queue: Queues = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="Children of every queue.")
    ] = None,
    app_dir: AppDir = None,
    socket: Socket = None,
) -> None:
    """Run the supervisor until it is told to stop. This is the default command.

    TERM or INT drains: running messages finish; another one more than a second later kills. HUP reloads handler code,
    USR1 logs a status line.
    """
    from supervisor.cli.running import run_supervisor  # noqa: PLC0415 - heavy
    from supervisor.config.sources import Overrides  # noqa: PLC0415 - heavy

    overrides = Overrides(
        config=config, dsn=dsn, queues=tuple(queue or ()), concurrency=concurrency, app_dir=app_dir, socket=socket
    )
    raise typer.Exit(run_supervisor(overrides))

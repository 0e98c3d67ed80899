"""`init`: make a database ready."""

from __future__ import annotations

import typer

from supervisor.cli.arguments import ConfigFile, Dsn, Json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init", short_help="Make a database ready: PGMQ, our schema, queues.")(init)


def init(config: ConfigFile = None, dsn: Dsn = None, as_json: Json = False) -> None:
    """Install PGMQ where it is missing, our schema, and the configured queues with their dead-letter queues.

    May be run again at any time: what is there stays as it is.
    """
    from supervisor.cli.queueing import initialise  # noqa: PLC0415 - heavy

    raise typer.Exit(initialise(config, dsn, as_json=as_json))

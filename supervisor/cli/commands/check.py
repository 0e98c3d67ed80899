"""`check`: everything that can be known before `run`, each with a remedy."""

from __future__ import annotations

import typer

from supervisor.cli.arguments import AppDir, ConfigFile, Dsn, Json, Queues

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check", short_help="Look at everything before a start; a remedy each.")(check)


def check(
    config: ConfigFile = None,
    dsn: Dsn = None,
    queue: Queues = None,
    app_dir: AppDir = None,
    as_json: Json = False,
) -> None:
    """Look at configuration, database, PGMQ, privileges, pooler, notify, handlers and budgets.

    Each finding is ok, warn or fail, with a remedy. Exits 1 where something fails. Nothing is changed, except that an
    embedded server is started where the DSN asks for one.
    """
    from supervisor.cli.checking import run_checks  # noqa: PLC0415 - heavy
    from supervisor.config.sources import Overrides  # noqa: PLC0415 - heavy

    overrides = Overrides(config=config, dsn=dsn, queues=tuple(queue or ()), app_dir=app_dir)
    raise typer.Exit(run_checks(overrides, as_json=as_json))

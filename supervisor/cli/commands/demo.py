"""`demo`: everything at once on an embedded database."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.arguments import ConfigFile, Dsn

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", short_help="Try it: good and bad messages, all accounted for.")(demo)


def demo(
    messages: Annotated[int, typer.Option("--messages", min=1, metavar="N", help="How many messages to send.")] = 200,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live view.")] = False,
    config: ConfigFile = None,
    dsn: Dsn = None,
) -> None:
    """Good, slow, flaky, crashing and hanging messages on an embedded database; a live view; a closing account.

    The last line is `account: sent=N succeeded=N dead_lettered=N left=0`. It always runs on a database of its own:
    --config and --dsn are accepted like everywhere and not used.
    """
    from importlib import import_module  # noqa: PLC0415 - heavy

    del config, dsn
    raise typer.Exit(import_module("supervisor.demo").main(messages, plain))

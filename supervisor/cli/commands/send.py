"""`send`: put messages into a queue."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.arguments import ConfigFile, Dsn, Json, QueueName

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("send")(send)


def send(
    queue: QueueName,
    body: Annotated[
        str | None,
        typer.Argument(
            metavar="[JSON|-]",
            help="One JSON document; '-' (or nothing, in a pipe) reads one a line from standard input. "
            "A negative number needs '--' before it.",
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="S", help='Visible only after this: seconds, or "250ms", "30s", "5m".'),
    ] = None,
    headers: Annotated[
        str | None, typer.Option("--headers", metavar="JSON", help="A JSON object, the same for every message.")
    ] = None,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Send one message, or one a line.

    Lines go in batches. A line that is no JSON is reported by its number and left out, all others are sent, and the
    exit code is 1. When the connection is lost, the lines whose outcome is unknown are named, and nothing is sent
    again: it may have arrived.
    """
    from supervisor.cli.sending import send_messages  # noqa: PLC0415 - heavy

    raise typer.Exit(send_messages(config, dsn, queue=queue, body=body, delay=delay, headers=headers, as_json=as_json))

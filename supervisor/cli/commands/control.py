"""`status`, `top`, `pause`, `resume`, `cancel`: a running supervisor, asked by its control socket.

What they do is in `supervisor.control.commands`; here is only what can be typed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from supervisor.cli.arguments import ConfigFile, Dsn, Json, QueueName, Socket

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, top, pause, resume, cancel):
        app.command(command.__name__)(command)


def status(config: ConfigFile = None, dsn: Dsn = None, socket: Socket = None, as_json: Json = False) -> None:
    """Show queues, children and what runs, once."""
    _call("status", config, dsn, socket, as_json=as_json)


def top(config: ConfigFile = None, dsn: Dsn = None, socket: Socket = None, as_json: Json = False) -> None:
    """Show queues, children and what runs, live, until interrupted."""
    _call("top", config, dsn, socket, as_json=as_json)


def pause(
    queue: QueueName, config: ConfigFile = None, dsn: Dsn = None, socket: Socket = None, as_json: Json = False
) -> None:
    """Stop claiming messages of a queue.

    On every supervisor of it; what runs goes on.
    """
    _call("pause", config, dsn, socket, as_json=as_json, queue=queue)


def resume(
    queue: QueueName, config: ConfigFile = None, dsn: Dsn = None, socket: Socket = None, as_json: Json = False
) -> None:
    """Claim messages of a paused queue again."""
    _call("resume", config, dsn, socket, as_json=as_json, queue=queue)


def cancel(
    queue: QueueName,
    msg_id: Annotated[int, typer.Argument(metavar="MSG_ID", help="Id of the running message.")],
    config: ConfigFile = None,
    dsn: Dsn = None,
    socket: Socket = None,
    as_json: Json = False,
) -> None:
    """Stop one running message.

    It becomes a dead letter with the reason `cancelled`.
    """
    _call("cancel", config, dsn, socket, as_json=as_json, queue=queue, msg_id=msg_id)


def _call(command: str, config: str | None, dsn: str | None, socket: str | None, **arguments: Any) -> None:
    """Call `supervisor.control.commands.<command>(overrides, **arguments) -> exit code`."""
    from supervisor.config.sources import Overrides  # noqa: PLC0415 - heavy

    overrides = Overrides(config=config, dsn=dsn, socket=socket)
    carry_out = getattr(import_module("supervisor.control.commands"), command)
    raise typer.Exit(carry_out(overrides, **arguments))

"""Options that every command has, and the freedom to write them before the command, or to leave `run` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

__all__ = ["AppDir", "ConfigFile", "Dsn", "Json", "QueueName", "Queues", "Socket", "Yes", "arrange"]

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="Configuration file (default: ./supervisor.toml if it is there)."
    ),
]
Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="Database: a PostgreSQL URL, key=value pairs, 'embedded' or 'embedded:DIR'. "
        "Else SUPERVISOR_DSN, SUPERVISOR_DATABASE__DSN, [database] dsn, DATABASE_URL.",
    ),
]
AppDir = Annotated[
    str | None,
    typer.Option("--app-dir", metavar="DIR", help="Where handlers are imported from (default: the working directory)."),
]
Socket = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="Control socket (default: in the runtime directory)."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", metavar="NAME=MODULE:FUNCTION", help="A queue and its handler; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")]

_HELP = ("--help", "-h")
_VALUED = frozenset({"--config", "-c", "--dsn", "--queue", "--concurrency", "--app-dir", "--socket", "--messages"})


def arrange(arguments: Sequence[str], commands: Mapping[str, Any], default: str) -> list[str]:
    """Put options that stand before a command behind it; without a command, the default one is meant.

    `commands` maps names to commands; a group has its own in an attribute `commands`.
    """
    path: list[str] = []
    options: list[str] = []
    rest = list(arguments)
    known: Mapping[str, Any] | None = commands
    while rest and known is not None:
        if rest[0].startswith("-") and rest[0] not in {"-", "--"}:
            taken = 2 if rest[0] in _VALUED and len(rest) > 1 else 1
            options += rest[:taken]
            del rest[:taken]
        elif rest[0] in known:
            known = getattr(known[rest[0]], "commands", None)
            path.append(rest.pop(0))
        else:
            break
    if path:
        return [*path, *options, *rest]
    if rest and rest[0] != "--":
        return rest  # no such command: the parser says so
    if any(option in options for option in _HELP):
        return ["--help"]
    if "--version" in options:
        return ["--version"]
    return [default, *options, *rest]

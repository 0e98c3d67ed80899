"""`dlq`: dead letters of a queue."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.arguments import ConfigFile, Dsn, Json

__all__ = ["register"]

Source = Annotated[str, typer.Argument(metavar="QUEUE", help="The source queue, not its dead-letter queue.")]
MsgIds = Annotated[
    list[int] | None, typer.Argument(metavar="[MSG_ID]...", help="Numbers of dead letters, as `dlq list` shows them.")
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the queue.")]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="REASON", help="Only those with this reason, such as hard_timeout.")
]


def register(app: typer.Typer) -> None:
    """Add the family."""
    family = typer.Typer(help="Look at dead letters, send them back, delete them.", rich_markup_mode=None)
    family.command("list", short_help="Show dead letters.")(list_)
    family.command("show", short_help="Show whole documents.")(show)
    family.command("redrive", short_help="Send dead letters back to their queue.")(redrive)
    family.command("purge")(purge)
    app.add_typer(family, name="dlq", no_args_is_help=True)


def list_(
    queue: Source,
    reason: Reason = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="At most this many, oldest first.")] = 1000,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show dead letters: number, reason, cause of death, attempts, error."""
    from supervisor.cli.dead_letters import list_dead_letters  # noqa: PLC0415 - heavy

    raise typer.Exit(list_dead_letters(config, dsn, queue=queue, reason=reason, limit=limit, as_json=as_json))


def show(
    queue: Source,
    msg_ids: MsgIds = None,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show whole documents: error, traceback, stack and output of the death, the message itself."""
    from supervisor.cli.dead_letters import show_dead_letters  # noqa: PLC0415 - heavy

    raise typer.Exit(show_dead_letters(config, dsn, queue=queue, msg_ids=msg_ids or [], as_json=as_json))


def redrive(
    queue: Source,
    msg_ids: MsgIds = None,
    everything: All = False,
    reason: Reason = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="At most this many messages a second.")
    ] = None,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Send dead letters back to their queue, as they were first sent, with a clean account."""
    from supervisor.cli.dead_letters import redrive_dead_letters  # noqa: PLC0415 - heavy

    raise typer.Exit(
        redrive_dead_letters(
            config,
            dsn,
            queue=queue,
            msg_ids=msg_ids or [],
            everything=everything,
            reason=reason,
            rate=rate,
            as_json=as_json,
        )
    )


def purge(
    queue: Source,
    msg_ids: MsgIds = None,
    everything: All = False,
    reason: Reason = None,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good."""
    from supervisor.cli.dead_letters import purge_dead_letters  # noqa: PLC0415 - heavy

    raise typer.Exit(
        purge_dead_letters(
            config, dsn, queue=queue, msg_ids=msg_ids or [], everything=everything, reason=reason, as_json=as_json
        )
    )

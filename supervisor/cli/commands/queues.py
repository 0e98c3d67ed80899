"""`queues`: list, create, drop, purge."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from supervisor.cli.arguments import ConfigFile, Dsn, Json, QueueName, Yes

__all__ = ["register"]


class StorageChoice(StrEnum):
    """As `storage` in the configuration."""

    DURABLE = "durable"
    UNLOGGED = "unlogged"
    PARTITIONED = "partitioned"


def register(app: typer.Typer) -> None:
    """Add the family."""
    family = typer.Typer(help="Look at queues, make and drop them, empty them.", rich_markup_mode=None)
    family.command("list", short_help="Show every queue with its counts.")(list_)
    family.command("create")(create)
    family.command("drop", short_help="Drop a queue with its messages.")(drop)
    family.command("purge", short_help="Delete messages that are not in flight.")(purge)
    app.add_typer(family, name="queues", no_args_is_help=True)


def list_(config: ConfigFile = None, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show every queue: visible, in flight, delayed, archived messages, and the age of the oldest visible one.

    In flight counts what was read and is not visible yet, messages that wait for their next attempt included.
    """
    from supervisor.cli.queueing import list_queues  # noqa: PLC0415 - heavy

    raise typer.Exit(list_queues(config, dsn, as_json=as_json))


def create(
    queue: QueueName,
    storage: Annotated[StorageChoice, typer.Option("--storage", help="How it is stored.")] = StorageChoice.DURABLE,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Make a queue. Where it is there already, nothing changes."""
    from supervisor.cli.queueing import create_queue  # noqa: PLC0415 - heavy

    raise typer.Exit(create_queue(config, dsn, queue=queue, storage=storage.value, as_json=as_json))


def drop(
    queue: QueueName,
    yes: Yes = False,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Drop a queue with its messages and its archive. Waits a few seconds for those who use it, then gives up."""
    from supervisor.cli.queueing import drop_queue  # noqa: PLC0415 - heavy

    raise typer.Exit(drop_queue(config, dsn, queue=queue, ask=not yes, as_json=as_json))


def purge(
    queue: QueueName,
    yes: Yes = False,
    config: ConfigFile = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete the messages of a queue, in batches, skipping what is in flight."""
    from supervisor.cli.queueing import purge_queue  # noqa: PLC0415 - heavy

    raise typer.Exit(purge_queue(config, dsn, queue=queue, ask=not yes, as_json=as_json))

"""What `init` and `queues` do."""

from __future__ import annotations

import sys
from typing import Any

from shared.durations import format_duration
from shared.errors import ValidationError
from shared.naming import validate_queue_name
from supervisor.cli.administration import Admin
from supervisor.cli.failures import ExitCode, say
from supervisor.cli.opening import connected
from supervisor.cli.output import Column, print_json, print_table
from supervisor.embedded import Installed, install_pgmq

__all__ = ["confirm", "create_queue", "drop_queue", "initialise", "list_queues", "purge_queue"]

_COLUMNS = (
    Column("queue", "queue"),
    Column("visible", "visible", "right"),
    Column("in_flight", "in flight", "right"),
    Column("delayed", "delayed", "right"),
    Column("archived", "archived", "right"),
    Column("oldest", "oldest visible", "right"),
    Column("storage", "storage"),
)
_PGMQ_SAID = {
    Installed.ALREADY: "PGMQ was there",
    Installed.EXTENSION: "PGMQ installed as an extension",
    Installed.SQL: "PGMQ installed from SQL",
}


def initialise(config_file: str | None, dsn: str | None, *, as_json: bool) -> int:
    """Make the database ready for the configuration."""
    done: list[dict[str, Any]] = []

    def tell(what: str, *, changed: bool) -> None:
        done.append({"what": what, "changed": changed})
        if not as_json:
            print(f"{'done' if changed else 'ok':<5}{what}")

    with connected(config_file, dsn) as (config, connection):
        admin = Admin(connection)
        installed = install_pgmq(connection)
        tell(_PGMQ_SAID[installed], changed=installed is not Installed.ALREADY)
        tell("schema pgmq_supervisor", changed=admin.create_schema())
        for name, queue in config.queues.items():
            tell(f"queue {name}", changed=admin.create(name, queue.storage.value))
            if queue.notify:
                tell(f"notifications of {name}", changed=admin.enable_notifications(name))
            target = queue.dead_letter_queue_of(name)
            tell(f"dead-letter queue {target}", changed=admin.create(target))
    if as_json:
        print_json(done)
    return ExitCode.CLEAN


def list_queues(config_file: str | None, dsn: str | None, *, as_json: bool) -> int:
    """Show every queue of the database."""
    with connected(config_file, dsn) as (_, connection):
        found = list(Admin(connection).list_queues())
    if as_json:
        print_json(
            [
                {
                    "queue": row.name,
                    "storage": row.storage,
                    "visible": row.visible,
                    "in_flight": row.in_flight,
                    "delayed": row.delayed,
                    "archived": row.archived,
                    "oldest_visible_seconds": row.oldest_visible_s,
                }
                for row in found
            ]
        )
        return ExitCode.CLEAN
    rows = [{**row._asdict(), "queue": row.name, "oldest": _age(row.oldest_visible_s)} for row in found]
    print_table(_COLUMNS, rows, empty="no queues; make one with `pgmq-supervisor queues create NAME`")
    return ExitCode.CLEAN


def _age(seconds: float | None) -> str | None:
    """Round an age for people."""
    if seconds is None:
        return None
    if seconds < 120:
        return format_duration(round(max(seconds, 0), 1))
    minutes = int(seconds // 60)
    return f"{minutes}m" if minutes < 120 else f"{minutes // 60}h{minutes % 60:02}m"


def create_queue(config_file: str | None, dsn: str | None, *, queue: str, storage: str, as_json: bool) -> int:
    """Make one queue."""
    validate_queue_name(queue)
    with connected(config_file, dsn) as (_, connection):
        created = Admin(connection).create(queue, storage)
    if as_json:
        print_json({"queue": queue, "created": created})
    else:
        print(f"{queue}: {'created' if created else 'was there already'}")
    return ExitCode.CLEAN


def drop_queue(config_file: str | None, dsn: str | None, *, queue: str, ask: bool, as_json: bool) -> int:
    """Drop one queue."""
    validate_queue_name(queue)
    with connected(config_file, dsn) as (_, connection):
        admin = Admin(connection)
        admin.require_queue(queue)
        if ask:
            confirm(f"drop {queue} with its messages and its archive?")
        admin.drop(queue)
    if as_json:
        print_json({"queue": queue, "dropped": True})
    else:
        print(f"{queue}: dropped")
    return ExitCode.CLEAN


def purge_queue(config_file: str | None, dsn: str | None, *, queue: str, ask: bool, as_json: bool) -> int:
    """Delete the messages of one queue that are not in flight."""
    validate_queue_name(queue)
    purged = 0
    with connected(config_file, dsn) as (_, connection):
        admin = Admin(connection)
        admin.require_queue(queue)
        if ask:
            confirm(f"delete the messages of {queue}?")
        for count in admin.purge(queue):
            purged += count
            if sys.stderr.isatty():
                say(f"{purged} so far")
    if as_json:
        print_json({"queue": queue, "purged": purged})
    else:
        print(f"{queue}: purged {purged} message{'' if purged == 1 else 's'}")
    return ExitCode.CLEAN


def confirm(question: str) -> None:
    """Ask on a terminal; in a script there is nobody to ask, and the command was meant. Raises for a no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ValidationError("nothing was changed", remedy="answer y, or give --yes")

"""What `init` and `queues` do."""

from __future__ import annotations

import dataclasses
import sys

from shared.durations import format_duration
from shared.errors import ValidationError
from shared.naming import validate_queue_name
from supervisor.cli.failures import ExitCode, warn
from supervisor.cli.opening import connected
from supervisor.cli.output import Column, counting, print_json, print_table
from supervisor.database.admin import Admin
from supervisor.embedded import Installed
from supervisor.preparing import wanted_queues

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
    with connected(config_file, dsn) as (config, connection):
        report = Admin(connection).initialise(wanted_queues(config))
    steps = [(_PGMQ_SAID[report.pgmq], report.pgmq is not Installed.ALREADY)]
    steps.append(("schema pgmq_supervisor", report.schema_created))
    steps += [(f"queue {name}", name in report.created) for name in sorted({*report.created, *report.present})]
    if as_json:
        print_json([{"what": what, "changed": changed} for what, changed in steps])
    else:
        for what, changed in steps:
            print(f"{'made' if changed else 'ok':<5}{what}")
    for name, why in report.notify_failed:
        warn(f"queue {name} will be polled, its notifications could not be set up: {why}")
    return ExitCode.CLEAN


def list_queues(config_file: str | None, dsn: str | None, *, as_json: bool) -> int:
    """Show every queue of the database."""
    with connected(config_file, dsn) as (_, connection):
        found = Admin(connection).list_queues()
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
    rows = [{**dataclasses.asdict(row), "queue": row.name, "oldest": _age(row.oldest_visible_s)} for row in found]
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
        created = Admin(connection).create_queue(queue, storage)
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
        admin.drop_queue(queue)
    if as_json:
        print_json({"queue": queue, "dropped": True})
    else:
        print(f"{queue}: dropped")
    return ExitCode.CLEAN


def purge_queue(config_file: str | None, dsn: str | None, *, queue: str, ask: bool, as_json: bool) -> int:
    """Delete the messages of one queue that are not in flight."""
    validate_queue_name(queue)
    with connected(config_file, dsn) as (_, connection):
        admin = Admin(connection)
        admin.require_queue(queue)
        if ask:
            confirm(f"delete the messages of {queue}?")
        with counting("purged") as advanced:
            result = admin.purge_queue(queue, advanced)
    if as_json:
        print_json({"queue": queue, "purged": result.deleted, "left": result.skipped})
    else:
        left = f", {result.skipped} in flight left" if result.skipped else ""
        print(f"{queue}: purged {result.deleted} message{'' if result.deleted == 1 else 's'}{left}")
    return ExitCode.CLEAN


def confirm(question: str) -> None:
    """Ask on a terminal; in a script there is nobody to ask, and the command was meant. Raises for a no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ValidationError("nothing was changed", remedy="answer y, or give --yes")

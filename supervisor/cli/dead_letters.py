"""What `dlq` does: look at dead letters, send them back, delete them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from shared.errors import DatabaseError, ValidationError
from shared.naming import dead_letter_queue_name, validate_queue_name
from supervisor.cli.failures import ExitCode, say
from supervisor.cli.opening import connected
from supervisor.cli.output import Column, counting, print_json, print_table
from supervisor.config import Config
from supervisor.core.types import DeadLetterReason
from supervisor.database.admin import Admin, DeadLetterRow, PurgeResult, RedriveResult

__all__ = ["list_dead_letters", "purge_dead_letters", "redrive_dead_letters", "show_dead_letters"]

_PAGE = 1000
_STEERING = {code: f"\\u{code:04x}" for code in range(127, 160)}  # what JSON leaves of what steers a terminal
_COLUMNS = (
    Column("msg_id", "id", "right"),
    Column("reason", "reason"),
    Column("cause", "cause"),
    Column("attempt", "attempt", "right"),
    Column("deaths", "deaths", "right"),
    Column("error", "error"),
    Column("source_msg_id", "message", "right"),
    Column("dead_lettered_at", "since"),
)


class _Letters:
    """The dead letters of one source. A source whose dead-letter queue was not needed yet has none."""

    def __init__(self, config: Config, connection: psycopg.Connection[Any], source: str) -> None:
        configured = config.queues.get(source)
        self.source = source
        self.dlq = configured.dead_letter_queue_of(source) if configured else dead_letter_queue_name(source)
        self.admin = Admin(connection)
        self.is_there = True
        try:
            self.admin.require_queue(self.dlq)
        except DatabaseError:
            self.admin.require_queue(source)
            self.is_there = False

    def some(self, reason: str | None, limit: int) -> Iterator[DeadLetterRow]:
        """The oldest ones."""
        after = 0
        while self.is_there and limit > 0:
            size = min(limit, _PAGE)
            page = self.admin.dead_letters(self.source, self.dlq, reason=reason, after=after, limit=size)
            yield from page
            if len(page) < size:
                return
            after = page[-1].msg_id
            limit -= size


@contextlib.contextmanager
def _opened(config_file: str | None, dsn: str | None, queue: str) -> Iterator[_Letters]:
    with connected(config_file, dsn) as (config, connection):
        yield _Letters(config, connection, queue)


def _check_reason(reason: str | None) -> None:
    if reason is not None and reason not in set(DeadLetterReason):
        raise ValidationError(f"there is no reason {reason!r}", remedy=f"one of {', '.join(DeadLetterReason)}")


def _check_choice(queue: str, msg_ids: Sequence[int], everything: bool, reason: str | None) -> None:
    """Either some by number, or all, or all with a reason."""
    validate_queue_name(queue)
    _check_reason(reason)
    if bool(msg_ids) == (everything or reason is not None):
        raise ValidationError(
            "give either MSG_ID... or --all or --reason" if msg_ids else "which dead letters?",
            remedy=f"name them by MSG_ID (`pgmq-supervisor dlq list {queue}`), or give --all or --reason",
        )


def list_dead_letters(
    config_file: str | None, dsn: str | None, *, queue: str, reason: str | None, limit: int, as_json: bool
) -> int:
    """Show a table, oldest first."""
    validate_queue_name(queue)
    _check_reason(reason)
    with _opened(config_file, dsn, queue) as letters:
        found = [dataclasses.asdict(row) for row in letters.some(reason, limit + 1)]
    rows = found[:limit]
    if as_json:
        print_json([{**row, **_numbers(row)} for row in rows])
        return ExitCode.CLEAN
    shown = [{**row, "error": _error(row["error_type"], row["error_message"])} for row in rows]
    print_table(_COLUMNS, shown, empty=f"{queue} has no dead letters")
    if len(found) > limit:
        say(f"there are more; --limit shows more than {limit}")
    return ExitCode.CLEAN


def _error(kind: str | None, message: str | None) -> str | None:
    """Put type and message into one line."""
    first = next(iter((message or "").splitlines()), "")[:80]
    return ": ".join(filter(None, [kind, first])) or None


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers as numbers, where they are."""
    keys = ("source_msg_id", "attempt", "deaths")
    return {key: int(row[key]) for key in keys if row[key] is not None and row[key].isdecimal() and len(row[key]) < 20}


def show_dead_letters(
    config_file: str | None, dsn: str | None, *, queue: str, msg_ids: Sequence[int], as_json: bool
) -> int:
    """Print whole documents. With --json as they stand there, one a line."""
    validate_queue_name(queue)
    if not msg_ids:
        raise ValidationError("no MSG_ID is given", remedy=f"`pgmq-supervisor dlq list {queue}` shows them")
    missing = 0
    with _opened(config_file, dsn, queue) as letters:
        for msg_id in msg_ids:
            text = letters.admin.dead_letter(letters.dlq, msg_id) if letters.is_there else None
            if text is None:
                missing += 1
                say(f"error: {queue} has no dead letter {msg_id}")
            else:
                print((text if as_json else _readable(text)).translate(_STEERING))
    return ExitCode.FAILED if missing else ExitCode.CLEAN


def _readable(text: str) -> str:
    """Indent a document. What Python's reader cannot take, or would take with fewer digits, is given as it came."""
    try:
        exact = json.loads(text, parse_float=str)
        document = json.loads(text)
        same = json.loads(json.dumps(document), parse_float=str, parse_constant=str) == exact
    except (ValueError, RecursionError):
        return text
    return json.dumps(document, indent=2, ensure_ascii=False) if same else text


def redrive_dead_letters(
    config_file: str | None,
    dsn: str | None,
    *,
    queue: str,
    msg_ids: Sequence[int],
    everything: bool,
    reason: str | None,
    rate: float | None,
    as_json: bool,
) -> int:
    """Send them back, at most `rate` a second."""
    _check_choice(queue, msg_ids, everything, reason)
    if rate is not None and not 0 < rate < float("inf"):
        raise ValidationError(f"--rate {rate:g} is not positive", remedy="give messages a second, such as --rate 10")
    with _opened(config_file, dsn, queue) as letters, counting("redriven") as advanced:
        if letters.is_there:
            result = letters.admin.redrive(
                queue, letters.dlq, msg_ids or None, reason=reason, rate=rate, advanced=advanced
            )
        else:
            result = RedriveResult(skipped=list(msg_ids))
    for msg_id in result.skipped:
        say(f"error: {queue} has no dead letter {msg_id}, or somebody has it in hand")
    for msg_id, why in result.failed:
        say(f"error: dead letter {msg_id} cannot go back: {why}")
    moved = len(result.moved)
    if as_json:
        print_json(
            {
                "queue": queue,
                "redriven": moved,
                "messages": [{"dead_letter": old, "msg_id": new} for old, new in result.moved],
                "skipped": result.skipped,
                "failed": [{"dead_letter": msg_id, "reason": why} for msg_id, why in result.failed],
            }
        )
    else:
        print(f"{queue}: redrove {moved} message{'' if moved == 1 else 's'}")
    return ExitCode.FAILED if result.failed or (msg_ids and result.skipped) else ExitCode.CLEAN


def purge_dead_letters(
    config_file: str | None,
    dsn: str | None,
    *,
    queue: str,
    msg_ids: Sequence[int],
    everything: bool,
    reason: str | None,
    as_json: bool,
) -> int:
    """Delete them."""
    _check_choice(queue, msg_ids, everything, reason)
    with _opened(config_file, dsn, queue) as letters:
        if letters.is_there:
            result = letters.admin.purge_dead_letters(queue, letters.dlq, msg_ids or None, reason=reason)
        else:
            result = PurgeResult(deleted=0, skipped=len(msg_ids))
    if as_json:
        print_json({"queue": queue, "purged": result.deleted, "skipped": result.skipped})
    else:
        print(f"{queue}: purged {result.deleted} dead letter{'' if result.deleted == 1 else 's'}")
    if msg_ids and result.skipped:
        say(f"error: {result.skipped} of those are no dead letters of {queue}, or somebody has them in hand")
        return ExitCode.FAILED
    return ExitCode.CLEAN

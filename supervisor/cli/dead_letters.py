"""What `dlq` does: look at dead letters, send them back, delete them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg

from shared.errors import DatabaseError, SupervisorError, ValidationError
from shared.naming import dead_letter_queue_name, validate_queue_name
from supervisor.cli.administration import Admin, DeadLetterRow
from supervisor.cli.failures import ExitCode, say
from supervisor.cli.opening import connected
from supervisor.cli.output import Column, print_json, print_table
from supervisor.config import Config
from supervisor.core.types import DeadLetterReason

__all__ = ["list_dead_letters", "purge_dead_letters", "redrive_dead_letters", "show_dead_letters"]

_PAGE = 1000
_MOVE_AT_ONCE = 100
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
    """The dead letters of one source."""

    def __init__(self, config: Config, connection: psycopg.Connection[Any], source: str) -> None:
        configured = config.queues.get(source)
        self.source = source
        self.dlq = configured.dead_letter_queue_of(source) if configured else dead_letter_queue_name(source)
        self.admin = Admin(connection)
        self.is_there = self.admin.exists(self.dlq)
        if not self.is_there and not self.admin.exists(source):
            raise DatabaseError(
                f"there is neither a queue {source} nor its dead-letter queue {self.dlq}",
                remedy="name the source queue, and give --config where its dead-letter queue has a name of its own",
            )

    def all(self, reason: str | None) -> Iterator[DeadLetterRow]:
        """Every dead letter, oldest first."""
        after = -1
        while self.is_there and (page := self.admin.dead_letters(self.dlq, self.source, after=after, limit=_PAGE)):
            after = page[-1].msg_id
            yield from (row for row in page if reason is None or row.reason == reason)


@contextlib.contextmanager
def _opened(config_file: str | None, dsn: str | None, queue: str) -> Iterator[_Letters]:
    validate_queue_name(queue)
    with connected(config_file, dsn) as (config, connection):
        yield _Letters(config, connection, queue)


def _check_reason(reason: str | None) -> None:
    if reason is not None and reason not in set(DeadLetterReason):
        raise ValidationError(f"there is no reason {reason!r}", remedy=f"one of {', '.join(DeadLetterReason)}")


def list_dead_letters(
    config_file: str | None, dsn: str | None, *, queue: str, reason: str | None, limit: int, as_json: bool
) -> int:
    """Show a table."""
    _check_reason(reason)
    rows: list[dict[str, Any]] = []
    more = False
    with _opened(config_file, dsn, queue) as letters:
        for letter in letters.all(reason):
            if len(rows) == limit:
                more = True
                break
            rows.append(letter._asdict())
    if as_json:
        print_json([{**row, **_numbers(row)} for row in rows])
        return ExitCode.CLEAN
    shown = [{**row, "error": _error(row["error_type"], row["error_message"])} for row in rows]
    print_table(_COLUMNS, shown, empty=f"{queue} has no dead letters")
    if more:
        say(f"there are more; --limit shows more than {limit}")
    return ExitCode.CLEAN


def _error(kind: str | None, message: str | None) -> str | None:
    """Put type and message into one line."""
    first = next(iter((message or "").splitlines()), "")[:80]
    return ": ".join(filter(None, [kind, first])) or None


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers as numbers, where they are."""
    keys = ("source_msg_id", "attempt", "deaths")
    return {key: int(row[key]) for key in keys if row[key] is not None and row[key].isdigit()}


def show_dead_letters(
    config_file: str | None, dsn: str | None, *, queue: str, msg_ids: Sequence[int], as_json: bool
) -> int:
    """Print whole documents. Numbers are printed as they stand there, digit by digit."""
    if not msg_ids:
        raise ValidationError("no MSG_ID is given", remedy=f"`pgmq-supervisor dlq list {queue}` shows them")
    missing: list[int] = []
    with _opened(config_file, dsn, queue) as letters:
        for msg_id in msg_ids:
            text = letters.admin.dead_letter(letters.dlq, msg_id) if letters.is_there else None
            if text is None:
                missing.append(msg_id)
            else:
                print((text if as_json else _readable(text)).translate(_STEERING))
    return _missing(queue, missing)


def _missing(queue: str, missing: Sequence[int]) -> int:
    for msg_id in missing:
        say(f"error: {queue} has no dead letter {msg_id}, or it is in somebody's hands")
    return ExitCode.FAILED if missing else ExitCode.CLEAN


def _readable(text: str) -> str:
    """Indent a document. What Python's reader cannot take is printed as it came."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if json.loads(json.dumps(document), parse_float=str) != json.loads(text, parse_float=str):
        return text  # a number would lose digits
    return json.dumps(document, indent=2, ensure_ascii=False)


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
    if rate is not None and not 0 < rate < float("inf"):
        raise ValidationError(f"--rate {rate:g} is not positive", remedy="give messages a second, such as --rate 10")
    _check_choice(queue, msg_ids, everything, reason)
    moved: dict[int, int] = {}
    with _opened(config_file, dsn, queue) as letters:
        letters.admin.require_queue(queue)
        at_once = _MOVE_AT_ONCE if rate is None else max(1, min(_MOVE_AT_ONCE, int(rate)))
        began = time.monotonic()

        def move(ids: Sequence[int]) -> Sequence[int]:
            if rate is not None and (ahead_s := len(moved) / rate - (time.monotonic() - began)) > 0:
                time.sleep(ahead_s)
            gone = letters.admin.redrive(letters.dlq, queue, ids)
            moved.update(gone)
            return list(gone)

        left = _work(letters, msg_ids, reason, move, at_once, "redriven")
    if as_json:
        print_json({"queue": queue, "redriven": len(moved), "messages": moved, "left": left})
    else:
        print(f"{queue}: redrove {len(moved)} message{'' if len(moved) == 1 else 's'}")
    return _missing(queue, left)


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
    purged = 0
    with _opened(config_file, dsn, queue) as letters:

        def delete(ids: Sequence[int]) -> Sequence[int]:
            nonlocal purged
            gone = letters.admin.purge_dead_letters(letters.dlq, queue, ids)
            purged += len(gone)
            return gone

        left = _work(letters, msg_ids, reason, delete, _PAGE, "purged")
    if as_json:
        print_json({"queue": queue, "purged": purged, "left": left})
    else:
        print(f"{queue}: purged {purged} dead letter{'' if purged == 1 else 's'}")
    return _missing(queue, left)


def _check_choice(queue: str, msg_ids: Sequence[int], everything: bool, reason: str | None) -> None:
    """Either some by number, or all, or all with a reason."""
    _check_reason(reason)
    if bool(msg_ids) == (everything or reason is not None):
        raise ValidationError(
            "give either MSG_ID... or --all or --reason" if msg_ids else "which dead letters?",
            remedy=f"name them by MSG_ID (`pgmq-supervisor dlq list {queue}`), or give --all or --reason",
        )


def _work(
    letters: _Letters,
    msg_ids: Sequence[int],
    reason: str | None,
    carry_out: Callable[[Sequence[int]], Sequence[int]],
    at_once: int,
    done: str,
) -> list[int]:
    """Carry something out on the chosen dead letters, in portions; gives those asked for by number that stayed."""
    if not letters.is_there:
        return list(msg_ids)
    ids = iter(dict.fromkeys(msg_ids)) if msg_ids else (row.msg_id for row in letters.all(reason))
    left: list[int] = []
    total = 0
    while portion := [msg_id for _, msg_id in zip(range(at_once), ids, strict=False)]:
        try:
            gone = carry_out(portion)
        except SupervisorError:
            if total:
                say(f"{total} were {done} before this")
            raise
        total += len(gone)
        left += [msg_id for msg_id in portion if msg_id not in set(gone)]
        if sys.stderr.isatty():
            print(f"\r{total} {done} ", end="", file=sys.stderr, flush=True)
    if total and sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return left if msg_ids else []

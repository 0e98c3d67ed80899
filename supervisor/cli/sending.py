"""Sending from the command line. Bodies travel as text and PostgreSQL reads them: no number loses a digit.

Every statement is its own transaction. A batch that the server refuses because of its data was not sent at all, so it
is halved until the guilty line stands alone. A statement whose answer was lost is never repeated: its lines are
reported as unknown.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.durations import parse_delay_ms
from shared.errors import ConnectionLost, ProcessError, SupervisorError, ValidationError
from shared.naming import validate_queue_name
from supervisor.cli.failures import ExitCode, report, say
from supervisor.cli.lines import Batch, read_batches
from supervisor.cli.opening import connected
from supervisor.cli.output import print_json
from supervisor.database.admin import Admin
from supervisor.database.failures import is_of_the_message

__all__ = ["send_messages"]


@dataclass(slots=True)
class _Account:
    """What became of the lines."""

    sent: int = 0
    first: int | None = None  # message ids
    last: int | None = None
    refused: list[tuple[int, str]] = field(default_factory=list)
    unknown: tuple[int, int] | None = None  # lines
    asked: tuple[int, int] | None = None  # lines of the statement that has no answer yet
    resume_at: int | None = None  # the first line that was not sent for sure


class _Stopped(Exception):
    """Nothing more can be sent; `error` says why."""

    def __init__(self, error: SupervisorError) -> None:
        super().__init__(str(error))
        self.error = error


def send_messages(
    config_file: str | None,
    dsn: str | None,
    *,
    queue: str,
    body: str | None,
    delay: str | None,
    headers: str | None,
    as_json: bool,
) -> int:
    """Send one document, or those on standard input. Gives the exit code."""
    validate_queue_name(queue)
    delay_ms = 0 if delay is None else parse_delay_ms(delay)
    _check_headers(headers)
    if body is None and sys.stdin.isatty():
        raise ValidationError("there is nothing to send", remedy="give a JSON document, or '-' and one a line on stdin")
    with connected(config_file, dsn) as (_, connection):
        admin = Admin(connection)
        admin.require_queue(queue)

        def send(bodies: Sequence[str]) -> Sequence[int]:
            return admin.send_batch(queue, bodies, headers=headers, delay_ms=delay_ms)

        if body is None or body == "-":
            return _send_lines(queue, send, as_json=as_json)
        return _send_one(queue, send, body, as_json=as_json)


def _check_headers(headers: str | None) -> None:
    """Refuse headers that are no object. They are sent as they were typed."""
    if headers is None:
        return
    remedy = "write a JSON object, for example '{\"tenant\": 7}'"
    try:
        found = json.loads(headers)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"--headers is not JSON: {error}", remedy=remedy) from error
    if not isinstance(found, dict):
        raise ValidationError("--headers is not a JSON object", remedy=remedy)


def _send_one(queue: str, send: Callable[[Sequence[str]], Sequence[int]], body: str, *, as_json: bool) -> int:
    try:
        body.encode()
    except UnicodeEncodeError as error:
        raise ValidationError("the message is not UTF-8", remedy="send it as UTF-8") from error
    try:
        [msg_id] = send([body])
    except ConnectionLost as error:
        raise ConnectionLost(
            f"the connection was lost, the outcome is unknown: {error.message}",
            operation="send",
            remedy="look whether the message is there before you send it again",
        ) from error
    except SupervisorError as error:
        if is_of_the_message(error):
            raise ValidationError(
                f"the message is refused: {error.message}", remedy="write JSON; a text needs quotes: '\"hello\"'"
            ) from error
        raise
    if as_json:
        print_json({"queue": queue, "sent": 1, "msg_id": msg_id})
    else:
        print(f"{queue}: sent message {msg_id}")
    return ExitCode.CLEAN


def _send_lines(queue: str, send: Callable[[Sequence[str]], Sequence[int]], *, as_json: bool) -> int:
    account = _Account()
    stopped: SupervisorError | None = None
    fd = sys.stdin.fileno()
    with _progress(fd) as advance:
        try:
            for batch in read_batches(fd):
                for number, reason in batch.refused:
                    _refuse(account, number, reason)
                _send_batch(account, send, batch.numbers, batch.bodies)
                advance(batch, account)
        except _Stopped as error:
            stopped = error.error
        except KeyboardInterrupt:
            stopped = ProcessError("interrupted", operation="send")
            account.unknown = account.asked
            account.resume_at = None if account.asked is None else account.asked[1] + 1
    _show(queue, account, stopped, as_json=as_json)
    return ExitCode.FAILED if stopped or account.refused else ExitCode.CLEAN


def _send_batch(
    account: _Account, send: Callable[[Sequence[str]], Sequence[int]], numbers: list[int], bodies: list[str]
) -> None:
    """Send these lines in their order; where the data of one is refused, in halves."""
    if not bodies:
        return
    account.asked = (numbers[0], numbers[-1])
    try:
        ids = send(bodies)
    except ConnectionLost as error:
        account.unknown = account.asked
        account.resume_at = numbers[-1] + 1
        raise _Stopped(error) from error
    except SupervisorError as error:
        if not is_of_the_message(error):
            account.resume_at = numbers[0]
            raise _Stopped(error) from error
        account.asked = None
        if len(bodies) == 1:
            _refuse(account, numbers[0], error.message)
            return
        half = len(bodies) // 2
        _send_batch(account, send, numbers[:half], bodies[:half])
        _send_batch(account, send, numbers[half:], bodies[half:])
        return
    account.asked = None
    account.sent += len(ids)
    account.first = ids[0] if account.first is None else account.first
    account.last = ids[-1]


def _refuse(account: _Account, number: int, reason: str) -> None:
    account.refused.append((number, reason))
    say(f"line {number}: {reason}; it was not sent")


def _show(queue: str, account: _Account, stopped: SupervisorError | None, *, as_json: bool) -> None:
    """Say what became of all lines; nothing is lost silently."""
    if stopped is not None:
        report(stopped)
    if account.unknown:
        first, last = account.unknown
        lines = f"line {first}" if first == last else f"lines {first}-{last}"
        say(f"outcome unknown for {lines}: there was no answer, and nothing is sent twice")
    if account.resume_at is not None:
        say(f"nothing from line {account.resume_at} on was sent; to go on: tail -n +{account.resume_at} FILE")
    if as_json:
        print_json(
            {
                "queue": queue,
                "sent": account.sent,
                "first_msg_id": account.first,
                "last_msg_id": account.last,
                "refused": [{"line": number, "reason": reason} for number, reason in account.refused],
                "unknown": None if account.unknown is None else {"from": account.unknown[0], "to": account.unknown[1]},
            }
        )
        return
    refused = f", refused {len(account.refused)}" if account.refused else ""
    print(f"{queue}: sent {account.sent} message{'' if account.sent == 1 else 's'}{refused}")


@contextlib.contextmanager
def _progress(fd: int) -> Iterator[Callable[[Batch, _Account], None]]:
    """Show a bar on a terminal: of the bytes of a file, else a count."""
    if not sys.stderr.isatty():
        yield lambda _batch, _account: None
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    found = os.fstat(fd)
    total = found.st_size if stat.S_ISREG(found.st_mode) else None
    columns = (TextColumn("sending"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("0 messages", total=total)

        def advance(batch: Batch, account: _Account) -> None:
            progress.update(task, advance=batch.size, description=f"{account.sent} messages")

        yield advance

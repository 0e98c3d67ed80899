"""`python -m crashtests run`: the command, its report for people and for machines, its exit code."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from rich.console import Console
from rich.table import Table

from crashtests.ground import Ground, ground
from crashtests.kill_points import Mode
from crashtests.users.judge import Judged, advise, is_violation
from crashtests.users.probe import Probe, ProbeFailed, call_setup
from crashtests.users.trial import Subject
from crashtests.users.trials import NoUse, Outcome, try_handler
from shared.errors import SupervisorError

__all__ = ["run"]

_DEFAULT_BODY = '{"operation_id": "{operation_id}"}'
_USAGE = 2


def run(
    handler: Annotated[str, typer.Argument(help="MODULE:FUNCTION, as in the configuration.", show_default=False)],
    probe: Annotated[str, typer.Option(help="MODULE:FUNCTION that counts the effects of a message.")],
    mode: Annotated[Mode, typer.Option(help="The handler's mode.")] = Mode.REGULAR,
    setup: Annotated[str | None, typer.Option(help="MODULE:FUNCTION, called once with the DSN: make tables.")] = None,
    app_dir: Annotated[Path, typer.Option(help="Where handler and probe are imported from.")] = Path(),
    dsn: Annotated[
        str, typer.Option(help="embedded: a server and databases of its own. Else a database; a queue is made in it.")
    ] = "embedded",
    body: Annotated[
        str, typer.Option(help="The message, JSON; {operation_id} in its texts becomes a fresh id for each message.")
    ] = _DEFAULT_BODY,
    lines: Annotated[int, typer.Option(help="Before how many of the handler's lines it is killed.", min=0)] = 12,
    only: Annotated[str, typer.Option(help="Only points whose name contains this, for example: before commit.")] = "",
    workers: Annotated[
        int, typer.Option(help="Trials at the same time; 0: 3 where the probe counts one message, else 1.", min=0)
    ] = 0,
    limit: Annotated[float, typer.Option(help="Seconds for a message, with all its attempts.")] = 60.0,
    strict: Annotated[bool, typer.Option(help="Repeated effects fail the run too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Kill a handler of yours at every point, and say where effects are lost, repeated or half-done.

    The probe is called with those of `body`, `operation_id`, `msg_id`, `dsn`, `connection` that it names, and returns a
    number or a dict of numbers. Exit code 1: lost, half-done or unknown, or repeated within the transaction.
    """
    subject = Subject(handler, mode, app_dir.resolve(), _parsed(body), limit)
    say = Console(stderr=True, highlight=False)
    try:
        with _ground(dsn, setup, subject.app_dir) as place, Probe(probe, subject.app_dir) as asked:
            side_by_side = workers or (3 if asked.counts_one_message else 1)

            def tell(one: Judged) -> None:
                say.print(f"{one.kind:9} {_where(one)}", markup=False, soft_wrap=True)

            outcome = try_handler(place, subject, asked, lines=lines, only=only, workers=side_by_side, tell=tell)
    except (NoUse, ProbeFailed, SupervisorError, psycopg.Error) as error:
        say.print(f"crashtests: {error}", markup=False)
        raise typer.Exit(_USAGE) from error
    document = _document(subject, outcome, strict=strict)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        _show(document, outcome)
    raise typer.Exit(0 if document["ok"] else 1)


def _parsed(body: str) -> object:
    try:
        return json.loads(body)
    except ValueError as error:
        raise typer.BadParameter(f"--body is no JSON: {error}") from error


@contextlib.contextmanager
def _ground(dsn: str, setup: str | None, app_dir: Path) -> Iterator[Ground]:
    def prepare(database: str) -> None:
        if setup is not None:
            call_setup(setup, app_dir, database)

    if dsn == "embedded":
        with ground(prepare=prepare) as place:
            yield place
    else:
        place = Ground(None, dsn, prepare=prepare)
        yield place


def _where(one: Judged) -> str:
    place = one.place
    return f"{place.point}{f' {place.text}' if place.text else ''} / {place.victim}: {one.text}"


def _document(subject: Subject, outcome: Outcome, *, strict: bool) -> dict[str, Any]:
    judged = outcome.judged
    kinds = [str(one.kind) for one in judged]
    return {
        "handler": subject.handler,
        "mode": str(subject.mode),
        "ok": not any(is_violation(one.kind, strict=strict) for one in judged),
        "expected": dict(outcome.expected),
        "inside_the_transaction": sorted(outcome.inside),
        "summary": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "points": [
            {
                "point": one.place.point,
                "victim": str(one.place.victim),
                "line": one.place.text or None,
                "held_at": one.place.at,
                "result": str(one.kind),
                "message": str(one.seen.end) if one.seen else None,
                "effects": dict(one.seen.counts) if one.seen else None,
                "effects_at_the_kill": dict(one.seen.between) if one.seen and one.seen.between is not None else None,
                "text": one.text,
            }
            for one in judged
        ],
        "advice": advise(subject.mode, judged, outcome.inside),
    }


def _show(document: dict[str, Any], outcome: Outcome) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{document['handler']}, {document['mode']}", title_justify="left")
    for head in ("point", "before line", "killed", "result", "what came of it"):
        table.add_column(head)
    for one in outcome.judged:
        text = one.text.splitlines()[0] if one.text else ""
        table.add_row(one.place.point, one.place.text, str(one.place.victim), str(one.kind), text)
    console.print(table)
    console.print("undisturbed: " + ", ".join(f"{name} {count}" for name, count in outcome.expected.items()))
    for line in document["advice"]:
        console.print(f"- {line}", markup=False, soft_wrap=not sys.stdout.isatty())
    counts = ", ".join(f"{kind} {count}" for kind, count in document["summary"].items())
    console.print(f"{'ok' if document['ok'] else 'NOT OK'}: {len(outcome.judged)} kills; {counts}")

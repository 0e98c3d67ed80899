"""All checks in order, shown as they come or as one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import psycopg

from shared.errors import SupervisorError
from supervisor.cli.checks.budgets import check_clock, check_connections, check_memory
from supervisor.cli.checks.database import check_pgmq, check_queues, check_server
from supervisor.cli.checks.environment import check_environment
from supervisor.cli.checks.findings import Finding, Level, fail, ok
from supervisor.cli.checks.handlers import check_handlers
from supervisor.cli.checks.notifications import check_notifications
from supervisor.cli.checks.settings import check_configuration
from supervisor.cli.failures import ExitCode
from supervisor.cli.handlers import try_handlers
from supervisor.cli.opening import connect, resolved
from supervisor.cli.output import print_json, printable
from supervisor.cli.server import look_at_server
from supervisor.config import Config, Overrides, examine
from supervisor.config.loading import NO_DATABASE
from supervisor.config.problems import redact_dsn

__all__ = ["run_checks"]

_IMPORT_PATIENCE_S = 30.0
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def run_checks(overrides: Overrides, *, as_json: bool) -> int:
    """Run every check and show the findings. Gives the exit code."""
    found: list[Finding] = []
    for finding in _all(overrides):
        found.append(finding)
        if not as_json:
            _show(finding)
    counts = {level: sum(finding.level is level for finding in found) for level in Level}
    if as_json:
        print_json(
            {
                "ok": not counts[Level.FAIL],
                "counts": {level.value: count for level, count in counts.items()},
                "findings": [finding.fields() for finding in found],
            }
        )
    else:
        print(f"{counts[Level.OK]} ok, {counts[Level.WARN]} warn, {counts[Level.FAIL]} fail")
    return ExitCode.FAILED if counts[Level.FAIL] else ExitCode.CLEAN


def _all(overrides: Overrides) -> Iterator[Finding]:
    yield from check_environment()
    examined = examine(overrides, needs_dsn=False)
    yield from check_configuration(examined)
    config = examined.config
    if config is None:
        return
    reports = try_handlers(config, timeout_s=_IMPORT_PATIENCE_S)
    yield from check_handlers(config, reports)
    yield from check_memory(config, reports)
    if config.database.dsn is None:
        yield fail("database", "no database is named", NO_DATABASE)
    else:
        yield from _database(config)


def _database(config: Config) -> Iterator[Finding]:
    try:
        with resolved(config) as found, connect(found) as connection:
            yield ok("database", f"reachable: {redact_dsn(found.dsn)}")
            facts = look_at_server(connection)
            yield from check_server(facts)
            yield from check_pgmq(connection, facts)
            if facts.has_pgmq and facts.may_use_pgmq:
                yield from check_queues(connection, found, facts.role)
            yield from check_connections(found, facts)
            yield from check_clock(connection)
            if not facts.standby:
                yield from check_notifications(found, connection, facts)
    except SupervisorError as error:
        yield fail("database", error.message, error.remedy or "see the message")
    except psycopg.Error as error:
        yield fail("database", f"looking at it failed: {' '.join(str(error).split())}", "see the message")


def _show(finding: Finding) -> None:
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 - only on a terminal
        from rich.text import Text  # noqa: PLC0415 - see above

        line = Text()
        line.append(f"{finding.level.value:<5}", style=_STYLES[finding.level])
        line.append(f"{printable(finding.subject)}: ", style="bold")
        line.append(printable(finding.text))
        console = Console(highlight=False)
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"     remedy: {printable(finding.remedy)}", style="dim"), soft_wrap=True)
        return
    print(f"{finding.level.value:<5}{printable(finding.subject)}: {printable(finding.text)}")
    if finding.remedy:
        print(f"     remedy: {printable(finding.remedy)}")
    sys.stdout.flush()

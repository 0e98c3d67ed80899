"""Handlers, each imported in a throw-away child as the supervisor would start one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.sizes import format_size
from supervisor.cli.checks.findings import Finding, fail, ok, warning
from supervisor.cli.handlers import HandlerReport, Verdict, memory_complaints
from supervisor.config import Config

__all__ = ["check_handlers"]


def check_handlers(config: Config, reports: Sequence[HandlerReport]) -> Iterator[Finding]:
    """Give one finding a handler, and one for each queue whose memory limit its child would break at once."""
    for report in reports:
        subject = f"handler {report.handler}"
        users = f"({report.mode}; queue {', '.join(report.queues)})"
        match report.verdict:
            case Verdict.GOOD:
                yield ok(subject, f"imports, {format_size(report.rss_bytes or None)} a child {users}")
            case Verdict.UNUSABLE:
                yield fail(subject, f"{report.reason} {users}", "correct the name or the function; see --app-dir")
            case Verdict.FAILED:
                lines = report.traceback.strip().splitlines()
                where = f" at {lines[-2].strip()}" if len(lines) > 1 else ""
                yield fail(subject, f"{report.reason}{where} {users}", "mend the module: `run` would park the queue")
            case Verdict.UNDECIDED:
                yield warning(subject, f"{report.reason} {users}", "import less at module level, or load on first use")
    for name, reason in memory_complaints(config, reports):
        yield fail(f"queue {name}", reason, "raise memory_limit, or import less")

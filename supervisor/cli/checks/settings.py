"""The configuration as findings."""

from __future__ import annotations

from collections.abc import Iterator

from supervisor.cli.checks.findings import Finding, fail, ok, warning
from supervisor.config import Examined, Problem

__all__ = ["check_configuration"]

_SUBJECT = "configuration"


def check_configuration(examined: Examined) -> Iterator[Finding]:
    """Give every problem and every warning; a configuration without problems also says what it has."""
    for problem in examined.problems:
        yield fail(_SUBJECT, _text(problem), problem.remedy)
    config = examined.config
    if config is not None:
        source = "defaults, environment and flags" if config.source is None else str(config.source)
        count = len(config.queues)
        yield ok(_SUBJECT, f"{source}: {count} queue{'' if count == 1 else 's'}")
        if not config.queues:
            yield warning(_SUBJECT, "no queue is configured: `run` would refuse", "add [queues.NAME] with its handler")
    for note in examined.warnings:
        yield warning(_SUBJECT, _text(note), note.remedy)


def _text(problem: Problem) -> str:
    key = "" if not problem.key else f" {problem.key}"
    value = "" if problem.value is None else f" = {problem.value}" if key else f" {problem.value}"
    return f"{problem.where}:{key}{value}: {problem.reason}"

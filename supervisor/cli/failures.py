"""Expected errors on the command line: one clear message with its remedy on stderr, and the exit code of its kind."""

from __future__ import annotations

import sys
from enum import IntEnum

from shared.errors import Category, SupervisorError

__all__ = ["ExitCode", "exit_code_of", "report", "say", "warn"]


class ExitCode(IntEnum):
    """The exit codes, as docs/commands.md explains them."""

    CLEAN = 0
    FAILED = 1
    USAGE = 2
    KILLED = 3


_USAGE = frozenset({Category.CONFIGURATION, Category.VALIDATION})


def exit_code_of(error: SupervisorError) -> ExitCode:
    """Usage and configuration are 2, everything else is 1."""
    return ExitCode.USAGE if error.category in _USAGE else ExitCode.FAILED


def report(error: SupervisorError) -> None:
    """Print an error for people."""
    text = f"{error.operation}: {error.message}" if error.operation else error.message
    if error.sqlstate:
        text += f" (SQLSTATE {error.sqlstate})"
    say(f"error: {text}")
    if error.remedy:
        say(f"remedy: {error.remedy}")


def warn(text: str) -> None:
    """Print a warning."""
    say(f"warning: {text}")


def say(text: str) -> None:
    """Print a line for people, on stderr: stdout belongs to results."""
    print(text, file=sys.stderr, flush=True)

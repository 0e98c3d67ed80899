"""The environment that we are installed in: what cannot live beside us."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from supervisor.cli.checks.findings import Finding, fail, ok

__all__ = ["check_environment"]

_SUBJECT = "installation"


def check_environment() -> Iterator[Finding]:
    """Look for supervisord, whose import package has the same name as ours."""
    other = _installed("supervisor")
    if other is None:
        yield ok(_SUBJECT, "no other project claims our package names")
    else:
        yield fail(
            _SUBJECT,
            f"the PyPI project supervisor {other.version} (supervisord) is installed in the same environment: "
            "its package `supervisor` and ours overwrite each other",
            "give each a virtual environment of its own; supervisord can start us from there",
        )


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None

"""Results on disk: one JSON file beside the report, a part for each mode, each with its date and its versions.

A part that is run again replaces its former result, and no other: the report can say of each what it is based on.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from crashtests.checker import Finding

__all__ = ["PARTS", "Part", "load", "save", "versions"]

# "soak" in a name: the long variant, which `make crash` must not replace by its short one.
PARTS: Final = (
    "points",
    "nth",
    "random",
    "random soak",
    "network",
    "endurance",
    "simulation",
    "simulation soak",
    "mutations",
)
_MOST_PROBLEMS: Final = 5


@dataclass(slots=True)
class Part:
    """The result of one mode. `rows` are its table, `summary` its figures, `problems` what was not ok.

    `tally` is what the figures were made of, where runs may be added later.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    at: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    tally: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong and nothing unknown."""
        return not self.problems

    def stamp(self, found: dict[str, str]) -> None:
        """Date it."""
        self.at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.versions = found

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            key: getattr(self, key) for key in ("rows", "summary", "problems", "seconds", "at", "versions", "tally")
        }


def problem(subject: str, findings: tuple[Finding, ...]) -> str:
    """One line for what went wrong with one run; many findings of a kind are counted, not listed."""
    texts = [f"{found.verdict}: {found.rule}: {found.text}" for found in findings[:_MOST_PROBLEMS]]
    more = len(findings) - len(texts)
    return f"{subject}: " + "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def load(path: Path) -> dict[str, Part]:
    """What is stored; empty where there is nothing, or nothing that can be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {name: Part(name, **stored[name]) for name in PARTS if name in stored}
    except (OSError, ValueError, TypeError):
        return {}


def save(path: Path, parts: dict[str, Part]) -> None:
    """Write it whole, or not at all."""
    fresh = path.with_name(path.name + ".new")
    text = json.dumps({name: parts[name].to_json() for name in PARTS if name in parts}, indent=1, ensure_ascii=False)
    fresh.write_text(text + "\n", encoding="utf-8")
    os.replace(fresh, path)


def versions(postgres: str = "") -> dict[str, str]:
    """What was tested with what."""
    found = {"pgmq-supervisor": _version("pgmq-supervisor"), "commit": _commit(), "Python": platform.python_version()}
    if postgres:
        found["PostgreSQL"] = postgres
    found["pgmq (SQL of its wheel)"] = _version("pgmq")
    found["psycopg"] = _version("psycopg")
    kernel = ".".join(platform.release().split(".")[:2])
    found["machine"] = f"Linux {kernel}, {platform.machine()}, {os.cpu_count()} CPUs"
    return found


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The checkout's commit, and whether its code was changed since; an installed package has none."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "none (installed)"
    commit = _git(root, "describe", "--always", "--abbrev=10", "--exclude=*")
    # The report is no code: what one part writes must not make the next one look like something else.
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/verification.*")
    return f"{commit}-dirty" if changed else commit or "unknown"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()

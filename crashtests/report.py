"""docs/verification.md: what was expected and what was seen, written by the harness and never by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from crashtests.kill_points import CASES
from crashtests.results import Part

__all__ = ["render", "write"]

_NOT_RUN: Final = "not run"
_INTRO: Final = """\
# Verification

Written by the harness, not by hand: `make crash` runs the kill points, n-th, random and network parts, `make soak` the
long ones, `make mutants` the deliberate faults. Each part says when and with what it was run last; a part that was
never run says "not run". What each failure *should* lead to stands in the failure model (`failure-model.md`); a
"duplicate" is a handler that ran again. The same seed tells the same story: `python -m crashtests random --seed N`.
"""

_HOW_POINTS: Final = """\
The victim stands still at the sync point, or is killed while the other process does; where both are killed, in both
orders. After each kill the row is read before anybody can react, and again when all is quiet.
"""

_HOW_NTH: Final = """\
Whoever crosses the n-th sync point is killed there, n = 1, 2, ... until a run ends unkilled; then whoever comes first
to those points at which nobody was.
"""

# What the harness cannot bring about: said here, so that nobody takes silence for success.
_ELSEWHERE: Final = (
    ("memory limits and OOM kills by cgroup v2", "unit tests only; needs a machine whose memory controller is v2"),
    (
        "promotion of a hot standby, failover that loses commits",
        "integration tests of the fence; no second server here",
    ),
    ("storage corruption, code after memory corruption", "outside the failure model"),
)


def render(parts: dict[str, Part]) -> str:
    """The whole document."""
    blocks = [_INTRO, *_dates(parts)]
    for title, name, body in (
        ("Kill points", "points", _points),
        ("The n-th sync point", "nth", _nth),
        ("Random kills", "random", _random),
        ("Random kills, the long run", "random soak", _random),
        ("Network", "network", _network),
        ("Endurance", "endurance", _figures),
        ("Simulation of the core", "simulation", _figures),
        ("Simulation of the core, the long run", "simulation soak", _figures),
        ("Deliberate faults", "mutations", _mutations),
    ):
        part = parts.get(name)
        blocks.append(f"## {title}\n")
        blocks += body(part)
        if part is not None:
            blocks += _problems(part)
    blocks += ["## Not run here\n", *_table(("scenario", "why, and what stands in"), _ELSEWHERE)]
    return "\n".join(blocks).rstrip() + "\n"


def write(path: Path, parts: dict[str, Part]) -> None:
    """Write the document."""
    path.write_text(render(parts), encoding="utf-8")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _dates(parts: dict[str, Part]) -> Iterator[str]:
    rows = [
        (part.name, part.at, f"{part.seconds:.0f} s", "ok" if part.ok else "not ok", _versions(part))
        for part in parts.values()
    ]
    yield from _table(("part", "run last", "took", "result", "with"), rows)


def _versions(part: Part) -> str:
    return ", ".join(f"{name} {version}" for name, version in part.versions.items())


def _problems(part: Part) -> Iterator[str]:
    if part.problems:
        yield "What was not ok:\n"
        yield from (f"- {line}" for line in part.problems)
        yield ""


def _points(part: Part | None) -> list[str]:
    """One row a case, run or not."""
    seen = {row["case"]: row for row in part.rows} if part is not None else {}
    rows = []
    for case in CASES:
        row = seen.get(case.name)
        head: tuple[Any, ...] = (case.point, case.victim, case.mode, f"`{case.at}`")
        tail: tuple[Any, ...] = (0, case.expected, _NOT_RUN, f"0 / {case.runs - 1}", _NOT_RUN)
        if row is not None:
            same = row["seen"] == case.expected
            tail = (
                row["runs"],
                case.expected,
                "as expected" if same else row["seen"],
                f"{row['repeats']} / {row['repeats_allowed']}",
                row["result"],
            )
        rows.append((*head, *tail))
    columns = ("point", "victim", "mode", "held at", "runs", "expected", "seen", "duplicates seen / allowed", "result")
    lines = [
        _HOW_POINTS,
        *_table(columns, rows),
    ]
    return lines + (_figure_lines(part) if part is not None else [])


def _nth(part: Part | None) -> list[str]:
    if part is None:
        return [_NOT_RUN + "\n"]
    rows = [(f"`{row['point']}`", row["kills"], row["repeats"], row["result"]) for row in part.rows]
    return [
        _HOW_NTH,
        *_table(("killed at", "runs", "duplicates seen", "result"), rows),
        *_figure_lines(part),
    ]


def _random(part: Part | None) -> list[str]:
    if part is None:
        return [_NOT_RUN + "\n"]
    rows = [(row["fault"], row["times"], row["runs"]) for row in part.rows]
    return [*_table(("fault", "times", "in runs"), rows), *_figure_lines(part)]


def _network(part: Part | None) -> list[str]:
    if part is None:
        return [_NOT_RUN + "\n"]
    rows = [
        (row["scenario"], row["promise"], row["runs"], f"{row['repeats']} / {row['repeats_allowed']}", row["result"])
        for row in part.rows
    ]
    head = ("scenario", "promise", "runs", "duplicates seen / allowed", "result")
    return [*_table(head, rows), *_figure_lines(part)]


def _figures(part: Part | None) -> list[str]:
    return [_NOT_RUN + "\n"] if part is None else _figure_lines(part)


def _mutations(part: Part | None) -> list[str]:
    if part is None:
        return [_NOT_RUN + "\n"]
    rows = [
        (row["fault"], f"`{row['file']}`", row["caught_by"], row["result"], row.get("commit", part.versions["commit"]))
        for row in part.rows
    ]
    return [
        "Each fault is put into a copy of the code, and the named tests are run there: they must fail.\n",
        *_table(("fault", "in", "caught by", "result", "with commit"), rows),
        *_figure_lines(part),
    ]


def _figure_lines(part: Part) -> list[str]:
    return [*(f"- {name}: {value}" for name, value in part.summary.items()), ""]

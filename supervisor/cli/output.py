"""Tables: drawn on a terminal, aligned plain text in a pipe, JSON for machines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Column", "counting", "print_json", "print_table", "printable"]

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the key of its values, and how it is shown."""

    key: str
    title: str
    align: Literal["left", "right"] = "left"


def printable(value: object) -> str:
    """Show a value; control characters, which could steer a terminal, are spelled out. None is a dash."""
    return "-" if value is None else str(value).translate(_CONTROL)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, empty: str) -> None:
    """Print rows. `empty` is said on stderr where there are none, so that a pipe stays empty but for its header."""
    lines = [[printable(row.get(column.key)) for column in columns] for row in rows]
    if not lines:
        print(empty, file=sys.stderr)
    if not sys.stdout.isatty():
        _print_plain(columns, lines)
    elif lines:
        _print_rich(columns, lines)


@contextlib.contextmanager
def counting(done: str) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many are done so far, on one line of stderr that is gone at the end."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return
    try:
        yield lambda count: print(f"\r{count} {done} ", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_plain(columns: Sequence[Column], lines: list[list[str]]) -> None:
    cells = [[column.title.upper().replace(" ", "_") for column in columns], *lines]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    for line in cells:
        parts = [
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _print_rich(columns: Sequence[Column], lines: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - only on a terminal
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.table import Table  # noqa: PLC0415 - see above
    from rich.text import Text  # noqa: PLC0415 - see above

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify=column.align, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)

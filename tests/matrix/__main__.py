"""The command line of the matrix."""

from __future__ import annotations

import argparse
import json
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from tests.matrix.cells import CELLS, OLDEST, Cell, Outcome, Result, parse
from tests.matrix.running import ALL, LIMIT_S, SMOKE, run

_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_RUN: "yellow"}


def main() -> int:
    """Run cells, print what came of them; 1 where a test failed."""
    options = _parser().parse_args()
    cells: list[Cell] = options.cell or ([OLDEST] if options.oldest else list(CELLS))
    tests = options.select or (SMOKE if options.smoke else ALL)
    out = sys.stderr if options.json else sys.stdout
    console = Console(file=out, width=None if out.isatty() else 120)
    results: list[Result] = []
    for cell in cells:
        console.print(f"== PostgreSQL {cell.postgres}, PGMQ {cell.pgmq}", highlight=False)
        result = run(cell, tests, image=options.image, arguments=options.pytest, limit_s=options.limit)
        console.print(f"   {_sentence(result)}", highlight=False, markup=False, soft_wrap=True)
        for failure in result.failures:
            console.print(f"   FAILED {failure}", highlight=False, markup=False, soft_wrap=True)
        results.append(result)
    if options.json:
        print(json.dumps([result.fields() for result in results], indent=2))
    else:
        console.print(_table(results))
        for reason in sorted({line for result in results for line in _reasons(result)}):
            console.print(reason, highlight=False, markup=False, soft_wrap=True)
    return int(any(result.outcome is Outcome.FAILED for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Tests against other versions.")
    parser.add_argument(
        "--cell", action="append", type=parse, metavar="PG:PGMQ", help="only this cell; may be repeated"
    )
    parser.add_argument("--oldest", action="store_true", help=f"only {OLDEST}, the pair that CI runs")
    parser.add_argument("--smoke", action="store_true", help="a short selection of tests")
    parser.add_argument("--select", action="append", metavar="PATH", help="tests instead of tests/integration")
    parser.add_argument("--image", help="another container image than PGMQ's own, for cells that need one")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds that a cell may take")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("pytest", nargs="*", help="after --: arguments for pytest")
    return parser


def _sentence(result: Result) -> str:
    if result.outcome is Outcome.NOT_RUN:
        return f"not run: {result.reason}"
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
    detail = f"; {result.reason}" if result.reason else ""
    return f"{result.outcome.value}: {counts} in {result.seconds:.0f} s on {result.server}{detail}; {result.log}"


def _table(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("PostgreSQL", "PGMQ", "result", "passed", "failed", "skipped", "seconds", "server"):
        table.add_column(
            name, justify="right" if name in {"passed", "failed", "skipped", "seconds"} else "left", no_wrap=True
        )
    for result in results:
        counts = ("", "", "", "")
        if result.outcome is not Outcome.NOT_RUN:
            counts = (str(result.passed), str(result.failed), str(result.skipped), f"{result.seconds:.0f}")
        outcome = f"[{_STYLES[result.outcome]}]{result.outcome.value}[/]"
        table.add_row(str(result.cell.postgres), result.cell.pgmq, outcome, *counts, result.server)
    return table


def _reasons(result: Result) -> list[str]:
    """Say what was not run, in a cell and of a cell."""
    if result.outcome is Outcome.NOT_RUN:
        return [f"{result.cell}: not run: {result.reason}"]
    return [f"{result.cell}: skipped {skip}" for skip in result.skips]


if __name__ == "__main__":
    sys.exit(main())

"""`make bench`: all benchmarks, a table, and JSON in `bench-results.json`. `ARGS="throughput"` chooses some."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import deaths, harness, latency, limits, page, scrapes, throughput, transactional

BENCHES: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "throughput": lambda dsn, quick: throughput.run(dsn, messages=20_000 if quick else 100_000),
    "latency": lambda dsn, quick: latency.run(dsn, rounds=10 if quick else 50),
    "deaths": lambda dsn, quick: deaths.run(dsn, messages=2_000 if quick else 10_000, rounds=10 if quick else 30),
    "limits": lambda dsn, quick: limits.run(dsn, rounds=1 if quick else 5),
    "scrapes": lambda dsn, quick: scrapes.run(dsn, messages=5_000 if quick else 20_000),
    "transactional": lambda dsn, quick: transactional.run(dsn, messages=4_000 if quick else 20_000),
}


def main() -> int:
    """Run the chosen benchmarks; 2 on a name that does not exist."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer messages")
    parser.add_argument("--out", type=Path, default=Path("bench-results.json"), help="where the JSON goes")
    parser.add_argument("--limits-page", type=Path, help="write the limits as a page, such as docs/limits.md")
    parser.add_argument("--page", type=Path, help="write the ratios as a page, such as docs/performance.md; needs all")
    arguments = parser.parse_args()
    if arguments.page is not None and arguments.names:
        parser.error("--page needs all benchmarks: name none")
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    console = Console()
    results: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    with harness.server() as dsn:
        for name in arguments.names or BENCHES:
            console.print(f"{name} ...")
            results[name] = BENCHES[name](dsn, arguments.quick)
            console.print(_table(name, results[name]))
    if arguments.limits_page is not None and "limits" in results:
        arguments.limits_page.write_text(limits.to_markdown(results["limits"], results))
    if arguments.page is not None:
        arguments.page.write_text(page.to_markdown(results))
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {arguments.out}")
    return 0


def _table(name: str, result: dict[str, Any]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for key, value in result.items():
        if isinstance(value, dict):
            for inner, figure in value.items():
                table.add_row(f"{key}: {inner}", str(figure))
        else:
            table.add_row(key, str(value))
    return table


if __name__ == "__main__":
    sys.exit(main())

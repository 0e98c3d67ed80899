"""`make mutants`: break every guard in turn and see who notices. Exit code 1 where nobody does."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from crashtests.report import write
from crashtests.results import Part, load, save, versions
from tests.mutation.faults import FAULTS, SIMULATION, Fault
from tests.mutation.tree import Asked, Tree, copied_tree

_NO_PROOF: Final = "fails without any fault"


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--only", default="", help="only faults whose name contains this; a report keeps its other rows"
    )
    parser.add_argument("--report", type=Path, default=None, help="put the table into this document")
    arguments = parser.parse_args()
    part = Part("mutations")
    began = time.monotonic()
    with copied_tree() as tree:
        if not tree.is_used():
            print("the copy is not what Python imports: nothing would be tested", file=sys.stderr)
            return 2
        chosen = [fault for fault in FAULTS if arguments.only in fault.name]
        for fault in chosen:
            row = _try(tree, fault)
            part.rows.append(row)
            print(f"{row['result']:10} {fault.name}: {row['caught_by']}", flush=True)
        _try_without(tree, part)
    stored = arguments.report.with_suffix(".json") if arguments.report is not None else None
    earlier = load(stored).get(part.name) if stored is not None and arguments.only else None
    part.seconds = time.monotonic() - began
    if earlier is not None:
        part.seconds += earlier.seconds
        part.rows = _together([{"commit": earlier.versions["commit"], **row} for row in earlier.rows], part.rows)
        part.problems += [line for line in earlier.problems if line.startswith(_NO_PROOF)]
    part.problems += [f"{row['fault']}: {row['result']}" for row in part.rows if row["result"] != "caught"]
    caught = sum(row["result"] == "caught" for row in part.rows)
    part.summary = {"faults caught": f"{caught} of {len(part.rows)}"}
    part.stamp(versions())
    print(f"{caught} of {len(part.rows)} faults are caught")
    if stored is not None:
        parts = {**load(stored), part.name: part}
        save(stored, parts)
        write(arguments.report, parts)
    return 0 if part.ok else 1


def _together(before: list[dict[str, str]], now: list[dict[str, str]]) -> list[dict[str, str]]:
    """In the order of the list: what was tried now, and what was tried before of faults that there still are."""
    rows = {row["fault"]: row for row in [*before, *now]}
    return [rows[fault.name] for fault in FAULTS if fault.name in rows]


def _try(tree: Tree, fault: Fault) -> dict[str, str]:
    row = {"fault": fault.name, "file": fault.file, "caught_by": "nobody", "result": "not caught"}
    row["commit"] = versions()["commit"]
    with tree.broken_by(fault):
        for tests in fault.tests:
            asked = tree.ask(tests)
            if asked.failed is not None:
                return {**row, "caught_by": asked.failed, "result": "caught"}
            if asked.broken is not None:
                row["caught_by"] = f"{tests}: {asked.broken}"
    return row


def _try_without(tree: Tree, part: Part) -> None:
    """The tests that caught something must pass where nothing is broken: else they prove nothing."""
    caught_by = list(dict.fromkeys(row["caught_by"] for row in part.rows if row["result"] == "caught"))
    tests = [test for test in caught_by if not test.startswith(SIMULATION)]
    for together in (tests, [SIMULATION] if len(tests) < len(caught_by) else []):
        asked = tree.ask(*together) if together else Asked()
        if asked.failed is not None or asked.broken is not None:
            part.problems.append(f"{_NO_PROOF}: {asked.failed or asked.broken}")
            print(part.problems[-1], flush=True)


if __name__ == "__main__":
    sys.exit(main())

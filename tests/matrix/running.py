"""One cell: the tests in a process of their own, with its server and its PGMQ, and what they said."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.matrix.cells import Cell, Outcome, Result
from tests.matrix.containers import container, image_of
from tests.matrix.fetching import CACHE, NotHere
from tests.matrix.versions import pgmq_folder, server_of
from tests.support.binaries import VARIABLE

__all__ = ["ALL", "LIMIT_S", "SMOKE", "run"]

_BOTH_MODES: Final = "tests/e2e/test_service_both_modes.py"
ALL: Final = ("tests/integration", _BOTH_MODES)
SMOKE: Final = (
    _BOTH_MODES,
    "tests/integration/test_sdk_queues.py",
    "tests/integration/test_sdk_capabilities.py",
    "tests/integration/test_sdk_partitioned.py",
    "tests/integration/test_statements_claiming.py",
    "tests/integration/test_statements_partitioned.py",
    "tests/integration/test_statements_settling.py",
    "tests/integration/test_statements_transactions.py",
)
_ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 3600.0


def run(
    cell: Cell, tests: Sequence[str], *, image: str | None, arguments: Sequence[str] = (), limit_s: float = LIMIT_S
) -> Result:
    """Run the tests of a cell, at most for `limit_s`; never raises for what the cell lacks."""
    environment = {**os.environ}
    for name in (VARIABLE, "SUPERVISOR_TEST_DSN"):
        environment.pop(name, None)
    try:
        with contextlib.ExitStack() as stack:
            if cell.image:
                image = image or image_of(cell)
                environment["SUPERVISOR_TEST_DSN"] = stack.enter_context(container(image))
                server = f"image {image}"
            else:
                found = server_of(cell.postgres)
                server = str(found)
                if found.folder is not None:
                    environment[VARIABLE] = str(found.folder)
                if (package := pgmq_folder(cell.pgmq)) is not None:
                    # Whoever looks for the SQL that the package ships finds this one first, in children too.
                    environment["PYTHONPATH"] = os.pathsep.join(
                        filter(None, [str(package), environment.get("PYTHONPATH")])
                    )
            return _tested(cell, server, tests, arguments, environment, limit_s)
    except NotHere as error:
        return Result(cell=cell, outcome=Outcome.NOT_RUN, reason=str(error))


def _tested(
    cell: Cell,
    server: str,
    tests: Sequence[str],
    arguments: Sequence[str],
    environment: dict[str, str],
    limit_s: float,
) -> Result:
    CACHE.mkdir(parents=True, exist_ok=True)
    name = str(cell).replace(":", "-")
    log, report = CACHE / f"{name}.log", CACHE / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.matrix.selection", "-p", "no:cacheprovider"]
    command += [f"--junit-xml={report}", *arguments, *tests]
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command, cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.monotonic() - began
    where = log.relative_to(_ROOT).as_posix()
    if not report.is_file():
        reason = f"pytest ended with {code} and without a report" if code >= 0 else f"not done within {limit_s:g} s"
        return Result(cell=cell, outcome=Outcome.FAILED, reason=reason, server=server, seconds=seconds, log=where)
    return _read(report, cell=cell, server=server, seconds=seconds, log=where, code=code)


def _read(report: Path, *, cell: Cell, server: str, seconds: float, log: str, code: int) -> Result:
    """Count what a report of pytest says."""
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - written a moment ago by our own process
    failures = tuple(
        f"{case.get('classname', '')}::{case.get('name', '')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    skips = Counter(
        re.sub(r"^not run: ", "", node.get("message", ""))
        for case in cases
        if (node := case.find("skipped")) is not None
    )
    skipped = sum(skips.values())
    passed = len({id(case) for case in cases}) - len(failures) - skipped
    # 5: no test was selected, which is no success either.
    return Result(
        cell=cell,
        outcome=Outcome.PASSED if code == 0 else Outcome.FAILED,
        reason="" if code in {0, 1} else f"pytest ended with {code}",
        server=server,
        passed=passed,
        failed=len(failures),
        skipped=skipped,
        seconds=seconds,
        failures=failures,
        skips=tuple(f"{count} x {reason}" for reason, count in sorted(skips.items())),
        log=log,
    )

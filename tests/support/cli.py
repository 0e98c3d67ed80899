"""The command line as its users type it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)


def typed(
    *arguments: str, cwd: Path, dsn: str | None = None, stdin: str | bytes = b"", env: dict[str, str] | None = None
) -> Done:
    """Run `python -m supervisor` in a folder, without any configuration of this shell."""
    environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("SUPERVISOR_")}
    environment.pop("DATABASE_URL", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    environment |= {**({"SUPERVISOR_DSN": dsn} if dsn else {}), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", *arguments],
        cwd=cwd,
        env=environment,
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=90,
        check=False,
    )
    result = Done(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "Traceback" not in result.err, result.err
    return result

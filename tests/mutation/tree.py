"""A copy of the code to break: made once, mended after each fault, gone in the end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.faults import SIMULATION, Fault

__all__ = ["ROOT", "Asked", "Tree", "copied_tree"]

ROOT: Final = Path(__file__).resolve().parents[2]
_PARTS: Final = (
    "supervisor",
    "child",
    "shared",
    "crashtests",
    "tests",
    "docs",
    "pyproject.toml",
    "README.md",
    "Makefile",
)
_LIMIT_S: Final = 900.0
_FAILED: Final = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)
_BROKEN_SEED: Final = re.compile(r"^seed (\d+): story \w+, \d+ steps: (.*)$", re.MULTILINE)
_TESTS_FAILED: Final = 1  # pytest's exit code; others say that it could not run them


@dataclass(frozen=True, slots=True)
class Asked:
    """What a set of tests says. `failed`: the first that failed; `broken`: why they could not be run."""

    failed: str | None = None
    broken: str | None = None


class Tree:
    """One copy."""

    def __init__(self, folder: Path) -> None:
        """Keep the folder."""
        self._folder = folder
        self._environ = {**os.environ, "PYTHONPATH": os.fspath(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    @contextlib.contextmanager
    def broken_by(self, fault: Fault) -> Iterator[None]:
        """Put the fault in, and take it out again."""
        path = self._folder / fault.file
        whole = path.read_text(encoding="utf-8")
        if whole.count(fault.old) != 1:
            raise ValueError(f"{fault.name}: its text occurs {whole.count(fault.old)} times in {fault.file}")
        path.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(whole, encoding="utf-8")

    def is_used(self) -> bool:
        """Whether Python really takes our packages from the copy."""
        code = "import supervisor, child, shared; print(supervisor.__file__, child.__file__, shared.__file__)"
        done = self._run([sys.executable, "-c", code])
        return all(path.startswith(f"{self._folder}{os.sep}") for path in done.stdout.split()) and bool(done.stdout)

    def ask(self, *tests: str) -> Asked:
        """Run tests until the first fails."""
        if tests == (SIMULATION,):
            done = self._run([sys.executable, "-m", "tests.simulation", "--seed", "1", "--runs", "300", "--tail", "0"])
            found = _BROKEN_SEED.search(done.stdout)
            if done.returncode == 0:
                return Asked()
            if found is None:  # the core itself raised
                return Asked(failed=f"simulation: {_last_line(done.stderr)}")
            return Asked(failed=f"simulation, seed {found[1]}: {found[2].partition(':')[0]}")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--ignore=tests/mutation/test_faults.py"]
        done = self._run([sys.executable, "-m", "pytest", *options, *tests])
        if done.returncode == 0:
            return Asked()
        found = _FAILED.search(done.stdout)
        if done.returncode == _TESTS_FAILED and found is not None:
            return Asked(failed=found[1])
        return Asked(broken=f"exit code {done.returncode}: {_last_line(done.stdout)} {_last_line(done.stderr)}")

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"not done after {_LIMIT_S:g} s")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:200] if text.strip() else ""


@contextlib.contextmanager
def copied_tree() -> Iterator[Tree]:
    """Copy what the tests need; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        folder.chmod(0o755)  # PostgreSQL's user looks at tests' folders
        for part in _PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, folder / part)
        yield Tree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""The entry: where we cannot run, and whose packages are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.__main__ import _unsuitable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("platform", "version", "said"),
    [
        ("darwin", (3, 12), "needs Linux"),
        ("win32", (3, 12), "needs Linux"),
        ("linux", (3, 10), "needs Python 3.11 or newer; this is 3.10"),
    ],
)
def test_unsuitable_machines(platform: str, version: tuple[int, int], said: str) -> None:
    """On another system or an older Python there is one clear line."""
    assert said in _unsuitable(platform, version)


def test_this_machine() -> None:
    """Where the tests run, we run."""
    assert _unsuitable("linux", (3, 11)) == ""


@pytest.mark.parametrize(
    ("release", "fits"), [("5.4.0-generic", True), ("5.3.18-150", False), ("4.19.0", False), ("6.1+", True)]
)
def test_kernels(monkeypatch: pytest.MonkeyPatch, release: str, fits: bool) -> None:
    """Kernels before 5.4 have no way to wait for a pidfd."""
    names = os.uname()
    found = os.uname_result((names.sysname, names.nodename, release, names.version, names.machine))
    monkeypatch.setattr(os, "uname", lambda: found)
    assert (_unsuitable("linux", (3, 11)) == "") is fits


def application(folder: Path) -> None:
    """Write an application whose packages are called like ours and must not be imported by the parent."""
    for name in ("shared", "child"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('imported the application')\n")
    (folder / "typer.py").write_text("raise SystemExit('imported the application')\n")


@pytest.mark.parametrize("path", ["", "APP", "."])
def test_applications_with_packages_like_ours(tmp_path: Path, path: str) -> None:
    """The parent imports its own `shared`, from whatever folder it is started, whatever PYTHONPATH says."""
    application(tmp_path / "app")
    if path == "APP":
        (tmp_path / "app" / "typer.py").unlink()
    pythonpath = ":".join(filter(None, [path.replace("APP", str(tmp_path / "app")), str(ROOT)]))
    environ = {**os.environ, "PYTHONPATH": pythonpath}
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "--config", "nowhere.toml"],
        cwd=tmp_path / "app" if path != "APP" else tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nowhere.toml" in done.stderr
    assert done.returncode == 2


def test_help_imports_nothing_heavy() -> None:
    """--help needs neither a database driver nor the models of the configuration."""
    code = (
        "import sys, atexit; sys.argv = ['x', '--help']\n"
        "heavy = ('psycopg', 'pydantic', 'rich', 'aiohttp', 'asyncio', 'prometheus_client')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules]))\n"
        "from supervisor.__main__ import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.endswith("[]\n")
    assert "Commands:" in done.stdout

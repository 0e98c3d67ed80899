"""Who runs the server: PostgreSQL refuses root, so root lends the work to an unprivileged user that already exists."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import UnsupportedError

__all__ = ["Account", "account_for", "own_account"]

_PREFERRED: Final = ("postgres", "nobody")
_PROBE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Account:
    """A user that programs run as; `switch` says that we are root and have to change to it."""

    name: str
    uid: int
    gid: int
    switch: bool

    def run(
        self, command: Sequence[str | Path], *, cwd: Path | str = "/", timeout_s: float = _PROBE_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end as this user, output captured."""
        return subprocess.run(
            [os.fspath(part) for part in command],
            cwd=cwd,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            umask=0o077,
            user=self.uid if self.switch else None,
            group=self.gid if self.switch else None,
            extra_groups=[] if self.switch else None,
        )

    def can_enter(self, folder: Path) -> bool:
        """Try whether this user can go into `folder`, by going there as this user."""
        return self.run(["/bin/sh", "-c", 'cd -- "$1"', "sh", folder]).returncode == 0


def clean_environment() -> dict[str, str]:
    """Give what a server program needs of the environment, and no PG* variable that would change what it does."""
    environment = {"PATH": os.environ.get("PATH") or os.defpath, "LC_ALL": "C"}
    for name in ("TZ", "TMPDIR"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return environment


def own_account() -> Account:
    """Describe the user that we are."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return Account(name=name, uid=uid, gid=os.getegid(), switch=False)


def account_for(owner_uid: int | None) -> Account:
    """Choose the user for the server: ourselves, or as root the owner of existing data, else postgres, else nobody.

    Users are never created. Raises `UnsupportedError` where root finds none to change to.
    """
    if os.geteuid() != 0:
        return own_account()
    if owner_uid:
        try:
            entry = pwd.getpwuid(owner_uid)
        except KeyError:
            return Account(name=f"uid {owner_uid}", uid=owner_uid, gid=owner_uid, switch=True)
        return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, switch=True)
    for name in _PREFERRED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid, switch=True)
    raise UnsupportedError(
        "PostgreSQL does not run as root, and this system has neither a user postgres nor a user nobody",
        operation="embedded server",
        remedy="run as an ordinary user, or give the DSN of a running server",
    )

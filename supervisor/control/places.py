"""Where the control socket lies: a folder that is ours alone, a name from the configuration's path.

First of these that can be used: `$XDG_RUNTIME_DIR`, `/run` (as root), `/tmp/pgmq-supervisor-UID` (made with 0700).
A folder counts only when it is a real folder, belongs to us (or to root) and nobody else can write to it; it is opened
once, checked as opened, and used through its descriptor, so that nobody can change a link in between.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shared.errors import ConfigurationError

SOCKET_PREFIX: Final = "pgmq-supervisor-"
_RUN: Final = Path("/run")
_TMP: Final = Path("/tmp")  # noqa: S108 - a folder of ours inside it, with ownership checked


class UnsafeFolderError(Exception):
    """The folder cannot be trusted with a socket that steers us."""


def candidates(environ: Mapping[str, str], *, uid: int | None = None) -> list[Path]:
    """List the folders where a socket may lie, in order of preference."""
    uid = os.geteuid() if uid is None else uid
    folders: list[Path] = []
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        folders.append(Path(runtime))
    if uid == 0:
        folders.append(_RUN)
    folders.append(_TMP / f"pgmq-supervisor-{uid}")
    return folders


def usable_folder(environ: Mapping[str, str]) -> Path:
    """Return the first folder that can be used, making the last one. Raises `ConfigurationError` with every reason."""
    reasons: list[str] = []
    for folder in candidates(environ):
        try:
            if folder.parent == _TMP and folder.name.startswith(SOCKET_PREFIX):
                _make_private(folder)
            with opened(folder):
                if os.access(folder, os.W_OK | os.X_OK):
                    return folder
            reasons.append(f"{folder} cannot be written")
        except (OSError, UnsafeFolderError) as error:
            reasons.append(str(error))
    raise ConfigurationError(
        f"no folder for the control socket: {'; '.join(reasons)}",
        operation="control socket",
        remedy="set [control] socket to a path in a folder of this user that nobody else can write",
    )


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Give a descriptor of a folder that was checked. Raises `UnsafeFolderError`, or OSError."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        complaint = _complaint(os.fstat(fd))
        if complaint:
            raise UnsafeFolderError(f"{folder} {complaint}")
        yield fd
    finally:
        os.close(fd)


def _complaint(found: os.stat_result) -> str | None:
    """Say why a folder is not safe."""
    if found.st_uid not in {os.geteuid(), 0}:
        return f"belongs to user {found.st_uid}"
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not found.st_mode & stat.S_ISVTX:
        return "can be written by others"
    return None


def _make_private(folder: Path) -> None:
    """Make the folder in /tmp, or check that an existing one is ours alone."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UnsafeFolderError(f"{folder} is no folder") from None
        if found.st_uid != os.geteuid():
            raise UnsafeFolderError(f"{folder} belongs to user {found.st_uid}") from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UnsafeFolderError(f"{folder} is open to others, mode {stat.S_IMODE(found.st_mode):o}") from None


def socket_name(config_path: Path) -> str:
    """Name the socket of a configuration, without a number and an ending."""
    digest = hashlib.blake2b(os.fsencode(config_path.resolve()), digest_size=8).hexdigest()
    return SOCKET_PREFIX + digest

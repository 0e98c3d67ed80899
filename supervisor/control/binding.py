"""Take the place of the control socket: never visible with other rights than 0600, never stolen from a living owner."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from shared.errors import ConfigurationError
from supervisor.control.places import UnsafeFolderError, opened, socket_name, usable_folder

_BACKLOG: Final = 16
_MAX_SIBLINGS: Final = 64


class InUseError(Exception):
    """A living supervisor has this socket."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} belongs to a running supervisor{owner}")


class BoundSocket:
    """A listening socket, its place in the file system, and the lock that says that its owner lives."""

    def __init__(self, sock: socket.socket, path: Path, lock: int) -> None:
        self.sock = sock
        self.path = path
        self._lock = lock
        self._inode = path.lstat().st_ino

    def close(self) -> None:
        """Stop listening and leave nothing behind, unless somebody else took the place."""
        self.sock.close()
        with suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
                lock_path(self.path).unlink()
        os.close(self._lock)


def lock_path(path: Path) -> Path:
    """Name the lock file beside a socket. It also says who the owner is."""
    return path.with_name(path.name + ".lock")


def bind_control_socket(*, configured: str | None, config_path: Path, environ: Mapping[str, str]) -> BoundSocket:
    """Listen on the configured path, or on one in the runtime folder named after the configuration.

    A configured path that belongs to a living supervisor is refused. In the runtime folder a second supervisor of the
    same configuration gets a numbered place. Raises `ConfigurationError` with a remedy.
    """
    try:
        if configured is not None:
            path = Path(configured).absolute()
            return _bind(path.parent.resolve() / path.name, config_path)
        folder = usable_folder(environ)
        name = socket_name(config_path)
        for number in range(1, _MAX_SIBLINGS + 1):
            with suppress(InUseError):
                return _bind(folder / (f"{name}.sock" if number == 1 else f"{name}-{number}.sock"), config_path)
        raise ConfigurationError(
            f"{_MAX_SIBLINGS} supervisors of {config_path} are running already",
            operation="control socket",
            remedy="stop some, or give this one a [control] socket of its own",
        )
    except InUseError as error:
        raise ConfigurationError(
            f"control socket {error}",
            operation="control socket",
            remedy="stop that one, or choose another path in [control] socket",
        ) from None
    except (OSError, UnsafeFolderError) as error:
        raise ConfigurationError(
            f"control socket {configured or ''}: {error}".replace(" :", ":"),
            operation="control socket",
            remedy="choose a path in a folder of this user that nobody else can write",
        ) from error


def _bind(path: Path, config_path: Path) -> BoundSocket:
    """Take one place. Raises `InUseError`, `UnsafeFolderError` or OSError."""
    with opened(path.parent) as folder:
        lock = _take_lock(folder, path)
        try:
            _refuse_other_files(folder, path)
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "config": str(config_path)}).encode(), 0)
            return BoundSocket(_listen(folder, path), path, lock)
        except BaseException:
            os.close(lock)
            raise


def _listen(folder: int, path: Path) -> socket.socket:
    """Bind under a hidden name and move it into place when it listens. Paths may be longer than an address."""
    hidden = f".{path.name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(hidden, dir_fd=folder)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        os.fchmod(sock.fileno(), 0o600)  # before bind: Linux gives the file these rights from its first instant
        sock.bind(f"/proc/self/fd/{folder}/{hidden}")
        sock.listen(_BACKLOG)
        os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        sock.close()
        with suppress(OSError):
            os.unlink(hidden, dir_fd=folder)
        raise
    return sock


def _take_lock(folder: int, path: Path) -> int:
    """Lock the file beside the socket for as long as we live. Raises `InUseError`."""
    name = lock_path(path).name
    while True:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode) or os.fstat(lock).st_uid != os.geteuid():
                raise UnsafeFolderError(f"{path.parent / name} is not a file of ours")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == os.fstat(lock).st_ino:
                    return lock
        except BlockingIOError:
            owner = describe_owner(lock)
            os.close(lock)
            raise InUseError(path, owner) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its owner removed it while it closed: try again with the file that is there now


def describe_owner(lock: int) -> str:
    """Say who wrote a lock file, " (pid 7, configuration x.toml)", or nothing."""
    try:
        told = json.loads(os.pread(lock, 8192, 0))
        return f" (pid {int(told['pid'])}, configuration {str(told['config'])[:500]})"
    except (ValueError, KeyError, TypeError, OSError):
        return ""


def _refuse_other_files(folder: int, path: Path) -> None:
    """A stale socket is replaced; anything else at this place is somebody's."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise UnsafeFolderError(f"{path} exists and is no socket")

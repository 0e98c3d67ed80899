"""Locks between processes on files of ours; the kernel lets go of them when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shared.errors import ConfigurationError, OperationTimeout

__all__ = ["FileLock"]

_LOOK_AGAIN_S: Final = 0.02


class FileLock:
    """One open file that can be locked shared or alone. Not inherited by programs that we start."""

    def __init__(self, path: Path) -> None:
        """Open the file, creating it if needed."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"the lock {path} cannot be opened: {error.strerror}",
                operation="embedded server",
                remedy="use the folder as the user who made it, or choose another one with embedded:DIR",
            ) from error

    def try_lock(self, *, shared: bool) -> bool:
        """Take the lock, or change it to the other kind, if that is possible at once."""
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock(self, *, shared: bool, timeout_s: float) -> None:
        """Take the lock, waiting for others. Raises `OperationTimeout`."""
        deadline = time.monotonic() + timeout_s
        while not self.try_lock(shared=shared):
            if time.monotonic() > deadline:
                raise OperationTimeout(
                    f"another process holds {self._path} for more than {timeout_s:g} s",
                    operation="embedded server",
                    remedy="look for a start or stop of this server that hangs",
                )
            time.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        """Let go of the lock and close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        """Lock nothing yet; `close` at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go."""
        self.close()

"""The command line's end of the control socket: find the running supervisor, ask it, check who answers."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.control.binding import lock_path
from supervisor.control.peers import is_trusted, peer_uid
from supervisor.control.places import SOCKET_PREFIX, UnsafeFolderError, candidates, opened, socket_name

_CONNECT_S: Final = 3.0
_ANSWER_S: Final = 65.0  # a little more than the server allows an action
_MAX_ANSWER_BYTES: Final = 64 << 20
_NAME: Final = re.compile(rf"{SOCKET_PREFIX}[0-9a-f]{{16}}(-\d+)?\.sock")


class ControlError(Exception):
    """No supervisor answered, or it refused. `exit_code` is the command's."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Found:
    """A supervisor that listens."""

    path: Path
    pid: int | None
    config: str | None

    def __str__(self) -> str:
        """Show it in a list to choose from."""
        return f"{self.path}  pid {self.pid or '?'}  {self.config or ''}".rstrip()


def choose_socket(
    *, socket_path: str | None, configured: str | None, config_path: Path | None, environ: Mapping[str, str]
) -> Path:
    """Return the socket to talk to. Raises `ControlError`; several that fit: listed, exit code 2.

    `socket_path` is `--socket`, `configured` is `[control] socket`. With a configuration only its own supervisors are
    looked for: what is steered must be what was meant. Without one, whatever runs.
    """
    chosen = socket_path or configured
    if chosen is not None:
        return Path(chosen)
    found = find_sockets(environ, config_path)
    if not found:
        what = f" of {config_path}" if config_path is not None else ""
        raise ControlError(f"no running supervisor{what} was found; --socket PATH names one")
    if len(found) > 1:
        listed = "\n".join(f"  {one}" for one in found)
        raise ControlError(f"several supervisors are running, choose one with --socket PATH:\n{listed}", exit_code=2)
    return found[0].path


def find_sockets(environ: Mapping[str, str], config_path: Path | None) -> list[Found]:
    """Find the sockets of living supervisors of this user."""
    wanted = None if config_path is None else socket_name(config_path)
    found: list[Found] = []
    for folder in candidates(environ):
        try:
            with opened(folder):
                names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
        except (OSError, UnsafeFolderError):
            continue
        paths = [folder / name for name in names if wanted is None or name.startswith(wanted)]
        found.extend(_describe(path) for path in paths if _is_alive(path))
    return found


def _is_alive(path: Path) -> bool:
    try:
        _connect(path).close()
    except (OSError, ControlError):
        return False
    return True


def _describe(path: Path) -> Found:
    with suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads(lock_path(path).read_bytes()[:8192])
        return Found(path, int(told["pid"]), str(told["config"]))
    return Found(path, None, None)


def _connect(path: Path) -> socket.socket:
    """Connect, and make sure that it is our user, or root, who listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_S)
        folder = os.open(path.absolute().parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{folder}/{path.name}")  # paths may be longer than an address
        finally:
            os.close(folder)
        if not is_trusted(peer_uid(sock)):
            raise ControlError(f"{path} belongs to user {peer_uid(sock)}, who is not to be trusted")
    except BaseException:
        sock.close()
        raise
    return sock


class Connection:
    """One connection, for one request or many."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises `ControlError`."""
        self._path = path
        try:
            self._sock = _connect(path)
        except PermissionError:
            raise ControlError(f"{path}: this user may not connect") from None
        except OSError as error:
            raise ControlError(f"no supervisor answers at {path}: {error.strerror or error}") from None
        self._sock.settimeout(_ANSWER_S)
        self._file = self._sock.makefile("rb")

    def ask(self, command: str, **fields: object) -> dict[str, Any]:
        """Send one request and return its result. Raises `ControlError` with the supervisor's reason."""
        try:
            self._sock.sendall(json.dumps({"command": command, **fields}).encode() + b"\n")
            line = self._file.readline(_MAX_ANSWER_BYTES)
            if not line.endswith(b"\n"):
                raise ControlError(f"the supervisor at {self._path} closed the connection")
            reply = json.loads(line)
        except TimeoutError:
            raise ControlError(f"the supervisor at {self._path} does not answer") from None
        except (OSError, ValueError) as error:
            raise ControlError(f"the supervisor at {self._path} is gone: {error}") from None
        if not reply.get("ok"):
            raise ControlError(str(reply.get("error")), exit_code=2 if reply.get("refusal") == "invalid" else 1)
        result: dict[str, Any] = reply["result"]
        return result

    def close(self) -> None:
        """Disconnect."""
        self._file.close()
        self._sock.close()


def ask(path: Path, command: str, **fields: object) -> dict[str, Any]:
    """Ask one thing."""
    connection = Connection(path)
    try:
        return connection.ask(command, **fields)
    finally:
        connection.close()

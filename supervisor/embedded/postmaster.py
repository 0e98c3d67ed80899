"""The server's first process: found by what its data directory says of it, watched by a pidfd, never by its name."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from psycopg import pq

from shared.errors import ProcessError
from supervisor.embedded.account import Account, clean_environment

__all__ = ["Postmaster", "launch", "running_postmaster"]


@dataclass(frozen=True, slots=True)
class Postmaster:
    """A live postmaster. `pidfd` is ours to close."""

    pid: int
    pidfd: int

    def wait_for_death(self, timeout_s: float) -> bool:
        """Tell whether it is dead, waiting up to `timeout_s`."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return False
        # Where we are its reaper (a subreaper, or PID 1), leave no zombie; somebody else's child is not ours to reap.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return True

    def send(self, signum: signal.Signals) -> None:
        """Signal exactly this process, alive or dead."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def close(self) -> None:
        """Stop watching."""
        os.close(self.pidfd)


@contextlib.contextmanager
def running_postmaster(data: Path) -> Iterator[Postmaster | None]:
    """Give the postmaster that runs on `data`, if any.

    The pid in postmaster.pid may be stale and may have been given to another process since: a postmaster is the one
    whose working directory is its data directory.
    """
    found = _look(data)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _look(data: Path) -> Postmaster | None:
    lines = pid_file(data)
    if not lines or not lines[0].lstrip("-").isdigit():
        return None
    pid = abs(int(lines[0]))
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        ours = os.path.samestat(os.stat(f"/proc/{pid}/cwd"), data.stat())
    except OSError:
        ours = False
    if ours:
        return Postmaster(pid=pid, pidfd=pidfd)
    os.close(pidfd)
    # PostgreSQL takes any process of this number for a server, a zombie too, and refuses to start; only for a number
    # that nobody has does it clear the file up itself.
    (data / "postmaster.pid").unlink(missing_ok=True)
    return None


def pid_file(data: Path) -> list[str]:
    """Read postmaster.pid: pid, data directory, start, port, socket folder, address, shared memory, status."""
    try:
        return (data / "postmaster.pid").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def socket_address(data: Path) -> tuple[str, str] | None:
    """Tell the folder and the port of the socket of the server that runs on `data`, once it has told them."""
    lines = pid_file(data)
    if len(lines) < 5 or not lines[3].strip() or not lines[4].strip():
        return None
    return lines[4].strip(), lines[3].strip()


def accepts_connections(conninfo: str) -> bool:
    """Ask whether the server is up and lets clients in."""
    return pq.PGconn.ping(conninfo.encode()) == pq.Ping.OK


def launch(program: Path, data: Path, *, account: Account, log: Path) -> Postmaster | None:
    """Start a postmaster that outlives us; None where it ended at once.

    A shell starts it and goes: the server gets a session of its own, so that Ctrl-C and a signal to our group pass it
    by, and it is nobody's child, so that whoever sweeps the children of this process leaves it alone (unless this
    process is a subreaper already: start the server first).
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log_fd = os.open(log, flags, 0o600)
    try:
        shell = subprocess.run(
            ["/bin/sh", "-c", '"$@" </dev/null >&2 & echo $!', "sh", os.fspath(program), "-D", os.fspath(data)],
            cwd="/",
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_fd,
            text=True,
            check=False,
            start_new_session=True,
            umask=0o077,
            user=account.uid if account.switch else None,
            group=account.gid if account.switch else None,
            extra_groups=[] if account.switch else None,
        )
    finally:
        os.close(log_fd)
    if shell.returncode != 0 or not shell.stdout.strip().isdigit():
        raise ProcessError("the server could not be started", operation="embedded server", detail=shell.stdout)
    pid = int(shell.stdout)
    try:
        return Postmaster(pid=pid, pidfd=os.pidfd_open(pid))
    except ProcessLookupError:
        return None

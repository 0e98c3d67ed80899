"""PgBouncer in transaction mode in front of a test's database. Where it is not installed, the test is not run."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from supervisor.embedded.account import account_for
from tests.support.folders import reachable_folder
from tests.support.waiting import eventually


@contextlib.contextmanager
def transaction_pooler(dsn: str, *, server_sessions: int = 2, takes_options: bool = False) -> Iterator[str]:
    """Start a pooler with so many sessions to the server; give the DSN of the same database behind it.

    `takes_options`: start-up parameters are dropped in silence, as many set it up, and not refused.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("not run: pgbouncer is not installed")
    target = conninfo.conninfo_to_dict(dsn)
    user, dbname = str(target["user"]), str(target["dbname"])
    with reachable_folder("pooler") as folder:
        _configure(folder, dsn, user, dbname, port := _free_port(), server_sessions, takes_options)
        account = account_for(None)
        options: dict[str, object] = {}
        if account.switch:
            shutil.chown(folder, account.uid, account.gid)
            options = {"user": account.uid, "group": account.gid, "extra_groups": []}
        command = [program, str(folder / "pgbouncer.ini")]
        with subprocess.Popen(  # type: ignore[call-overload] # options are keywords of Popen
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, **options
        ) as process:
            try:
                behind = conninfo.make_conninfo(user=user, dbname=dbname, host="127.0.0.1", port=port)
                eventually(lambda: _answers(behind), what="the pooler")
                yield behind
            finally:
                process.kill()


def _configure(
    folder: Path, dsn: str, user: str, dbname: str, port: int, server_sessions: int, takes_options: bool
) -> None:
    (folder / "users.txt").write_text(f'"{user}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""
[databases]
{dbname} = {dsn}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
auth_file = {folder}/users.txt
pool_mode = transaction
default_pool_size = {server_sessions}
ignore_startup_parameters = extra_float_digits{", options" if takes_options else ""}
logfile = {folder}/pgbouncer.log
"""
    )
    for file in folder.iterdir():
        file.chmod(0o644)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(dsn: str) -> bool:
    try:
        with psycopg.connect(dsn, connect_timeout=2, autocommit=True, prepare_threshold=None) as connection:
            return connection.execute("select 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False

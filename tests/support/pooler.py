"""PgBouncer in transaction mode before any database, where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Final

import psycopg
import pytest
from psycopg import conninfo

from supervisor.embedded.account import account_for
from tests.support.folders import reachable_folder
from tests.support.waiting import eventually

__all__ = ["free_port", "needs_pooler", "pooler"]

_PGBOUNCER: Final = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")

needs_pooler = pytest.mark.skipif(_PGBOUNCER is None, reason="not run: pgbouncer is not installed")


def free_port() -> int:
    """Find a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def pooler(dsn: str) -> Iterator[str]:
    """Run a pooler with two sessions; give the DSN of the same database through it."""
    with psycopg.connect(dsn) as connection:
        info = connection.info
        server = f"host={info.host} port={info.port} user={info.user}"
        name, user = info.dbname, info.user
    port = free_port()
    account = account_for(None)
    with reachable_folder("pooler") as folder:
        settings = folder / "pgbouncer.ini"
        users = folder / "users.txt"
        users.write_text(f'"{user}" ""\n')
        settings.write_text(
            f"[databases]\n{name} = {server} dbname={name}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\nauth_file = {users}\n"
            "pool_mode = transaction\ndefault_pool_size = 2\nunix_socket_dir =\n"
        )
        for path in (folder, settings, users):
            path.chmod(0o755)
        process = subprocess.Popen(
            [str(_PGBOUNCER), str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=account.uid if account.switch else None,
            group=account.gid if account.switch else None,
            extra_groups=[] if account.switch else None,
        )
        try:
            through = conninfo.make_conninfo(host="127.0.0.1", port=port, user=user, dbname=name)
            eventually(lambda: _answers(through), what="the pooler")
            yield through
        finally:
            process.kill()
            process.wait()


def _answers(dsn: str) -> bool:
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, connect_timeout=2):
        return True
    return False

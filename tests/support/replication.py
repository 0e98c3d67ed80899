"""Two servers, the second of which follows the first by streaming replication."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import conninfo

from supervisor.embedded import EmbeddedServer, install_pgmq
from supervisor.embedded.account import account_for
from tests.support.binaries import chosen_binaries
from tests.support.folders import reachable_folder
from tests.support.waiting import eventually


@dataclass(frozen=True, slots=True)
class Pair:
    """A primary and its hot standby, both with PGMQ."""

    primary: EmbeddedServer
    standby: EmbeddedServer

    @property
    def dsn(self) -> str:
        """The DSN of both, for who wants the one that can be written to."""
        first, second = (conninfo.conninfo_to_dict(server.dsn()) for server in (self.primary, self.standby))
        return conninfo.make_conninfo(
            host=f"{first['host']},{second['host']}",
            port=f"{first['port']},{second['port']}",
            user=first["user"],
            dbname=first["dbname"],
            target_session_attrs="read-write",
        )

    def promote(self) -> None:
        """Make a primary of the standby."""
        with psycopg.connect(self.standby.dsn(), autocommit=True) as connection:
            assert connection.execute("select pg_promote()").fetchone() == (True,)

    def until_caught_up(self) -> None:
        """Wait until the standby has all that the primary has."""
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            eventually(
                lambda: (
                    connection.execute(
                        "select count(*) from pg_stat_replication"
                        " where state = 'streaming' and replay_lsn >= pg_current_wal_lsn()"
                    ).fetchone()
                    == (1,)
                ),
                timeout_s=60,
                what="a standby that follows",
            )


@contextlib.contextmanager
def replicated_servers(*, synchronous: bool = False) -> Iterator[Pair]:
    """Start both; with `synchronous` no commit is told before the standby has it."""
    settings = {"fsync": "off", "wal_level": "replica", "max_wal_senders": "4", "hot_standby": "on"}
    with reachable_folder("primary") as here, reachable_folder("standby") as there:
        primary = EmbeddedServer(here, base=here, explicit=True, settings=settings, binaries=chosen_binaries())
        with primary:
            with psycopg.connect(primary.dsn(), autocommit=True) as connection:
                install_pgmq(connection)
            data, followed = primary.data_path, conninfo.conninfo_to_dict(primary.dsn())
            primary.stop()
            _copy(data, there / "data")
            primary.start()
            leader = conninfo.make_conninfo(host=followed["host"], port=followed["port"], user=followed["user"])
            following = {**settings, "primary_conninfo": leader}
            standby = EmbeddedServer(there, base=there, explicit=True, settings=following, binaries=chosen_binaries())
            with standby:
                pair = Pair(primary, standby)
                pair.until_caught_up()
                if synchronous:
                    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
                        connection.execute("alter system set synchronous_standby_names = '*'")
                        connection.execute("select pg_reload_conf()")
                yield pair


def _copy(source: Path, target: Path) -> None:
    """Copy a data directory at rest, for the same user, and mark it as a standby's."""
    shutil.copytree(source, target)
    (target / "standby.signal").touch()
    account = account_for(None)
    if account.switch:
        for path in [target, *target.rglob("*")]:
            os.chown(path, account.uid, account.gid, follow_symlinks=False)

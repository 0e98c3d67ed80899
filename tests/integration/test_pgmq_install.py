"""Installing PGMQ where it is missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from shared.errors import DatabaseError, UnsupportedError
from supervisor.embedded import Installed, install_pgmq
from supervisor.embedded.pgmq_install import shipped_sql


def install(dsn: str) -> Installed:
    """Install with a connection of its own."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return install_pgmq(connection)


def test_pgmq_is_installed_once(bare_database: str) -> None:
    """The first call installs a PGMQ that works, the second finds it."""
    assert install(bare_database) in {Installed.SQL, Installed.EXTENSION}
    assert install(bare_database) is Installed.ALREADY
    with psycopg.connect(bare_database) as connection:
        connection.execute("select pgmq.create('orders')")
        assert connection.execute("select pgmq.send('orders', '{}')").fetchone() == (1,)


def test_twenty_installers_at_once_all_succeed(bare_database: str) -> None:
    """Concurrent first starts wait for each other; one installs."""
    with ThreadPoolExecutor(20) as pool:
        done = list(pool.map(install, [bare_database] * 20))
    assert sum(result is not Installed.ALREADY for result in done) == 1


def test_a_role_without_rights_is_told_what_to_do(bare_database: str) -> None:
    """The error names the privilege and the remedy, and nothing half-made stays."""
    with psycopg.connect(bare_database, autocommit=True) as connection:
        connection.execute("set role pg_monitor")
        with pytest.raises(DatabaseError, match="may not install") as caught:
            install_pgmq(connection)
        assert caught.value.remedy
        assert connection.execute("select to_regnamespace('pgmq')").fetchone() == (None,)


def test_a_half_made_schema_does_not_stay_half_made(bare_database: str) -> None:
    """An empty schema of this name is completed; one in the way is reported, and the try leaves nothing."""
    with psycopg.connect(bare_database, autocommit=True) as connection:
        connection.execute("create schema pgmq; create view pgmq.meta as select 1 as queue_name")
        with pytest.raises(DatabaseError):
            install_pgmq(connection)
        made = connection.execute("select count(*) from pg_proc where pronamespace = 'pgmq'::regnamespace").fetchone()
        assert made == (0,)
        connection.execute("drop view pgmq.meta")
        assert install_pgmq(connection) is not Installed.ALREADY


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither extension nor wheel: a clear remedy."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="pgmq"):
        shipped_sql()

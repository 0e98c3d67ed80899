"""From what was typed to a configuration and a database that answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

from shared.errors import ConnectionLost
from supervisor.cli.failures import say
from supervisor.config import Config, Overrides, load
from supervisor.config.problems import redact_dsn
from supervisor.database.failures import connect_remedy
from supervisor.embedded import install_pgmq, is_embedded_dsn, resolve_dsn

__all__ = ["APPLICATION", "connect", "connected", "resolved"]

APPLICATION = "pgmq-supervisor cli"


@contextlib.contextmanager
def resolved(config: Config, *, announce: Callable[[str], None] = say) -> Iterator[Config]:
    """Give the configuration with a DSN that libpq understands; an embedded server runs for that long.

    An embedded server is ours alone, so PGMQ is put into it where it is missing.
    """
    with resolve_dsn(config.dsn, base=Path.cwd(), say=announce) as dsn:
        found = config.with_dsn(dsn)
        if is_embedded_dsn(config.dsn):
            with connect(found) as connection:
                install_pgmq(connection)
        yield found


def connect(config: Config, dsn: str | None = None) -> psycopg.Connection[Any]:
    """Open one connection in autocommit. Raises `ConnectionLost` with a remedy."""
    target = config.dsn if dsn is None else dsn
    timeout_s = max(1, round(config.database.connect_timeout))
    try:
        # No prepared statements: behind a pooler they belong to somebody else's session.
        return psycopg.connect(
            target, autocommit=True, prepare_threshold=None, connect_timeout=timeout_s, application_name=APPLICATION
        )
    except psycopg.OperationalError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        origin = f" (from {config.dsn_origin})" if config.dsn_origin else ""
        raise ConnectionLost(
            f"the database cannot be reached: {redact_dsn(lines[0] if lines else repr(error))}",
            operation="connect",
            sqlstate=error.sqlstate,
            remedy=connect_remedy(str(error))
            or f"look whether {redact_dsn(target)}{origin} is right and the server is up; "
            "`--dsn embedded` starts one of its own",
        ) from error


@contextlib.contextmanager
def connected(config_file: str | None, dsn: str | None) -> Iterator[tuple[Config, psycopg.Connection[Any]]]:
    """For commands that only need a database: load, resolve, connect."""
    with resolved(load(Overrides(config=config_file, dsn=dsn))) as config, connect(config) as connection:
        yield config, connection

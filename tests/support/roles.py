"""Roles that are no superuser, and what `check` asks to be granted to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import conninfo

from tests.support.cli import Done, typed

__all__ = ["grant_what_check_asks", "ordinary_role"]

_ROUNDS = 8


@contextlib.contextmanager
def ordinary_role(database: str, name: str) -> Iterator[str]:
    """Make a role that may log in and nothing else; give its DSN."""
    role = f"{name}_{conninfo.conninfo_to_dict(database)['dbname']}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"create role {role} login".encode())
        try:
            yield conninfo.make_conninfo(database, user=role)
        finally:
            connection.execute(f"drop owned by {role}; drop role {role}".encode())


def grant_what_check_asks(folder: Path, owner: str, dsn: str) -> tuple[Done, list[str]]:
    """Do as the remedies say until none asks for a grant; give the last check and all that was granted."""
    granted: list[str] = []
    with psycopg.connect(owner, autocommit=True) as connection:
        for _ in range(_ROUNDS):
            done = typed("check", "--json", cwd=folder, dsn=dsn)
            remedies = [one["remedy"] for one in done.json["findings"] if one["level"] != "ok"]
            grants = [part.strip() for remedy in remedies for part in remedy.split(";") if "grant " in part]
            if not grants:
                return done, granted
            for grant in grants:
                connection.execute(grant.encode())
                granted.append(grant)
    raise AssertionError(f"check asks for more and more: {granted}")

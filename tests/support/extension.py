"""A server that offers PGMQ as an extension: a private copy of the programs with two more files in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import pytest

from supervisor.embedded import EmbeddedServer
from supervisor.embedded.binaries import copy_binaries, find_binaries
from supervisor.embedded.pgmq_install import shipped_sql
from tests.support.binaries import chosen_binaries
from tests.support.folders import reachable_folder

__all__ = ["VERSION", "extension_server"]

VERSION: Final = "1.13.77"
"""What this extension calls itself: a number that nothing but pg_extension can have told."""

_CONTROL: Final = f"default_version = '{VERSION}'\nschema = pgmq\nrelocatable = false\n"


@contextlib.contextmanager
def extension_server() -> Iterator[EmbeddedServer]:
    """Start one. The SQL is that of the wheel `pgmq`, as the extension of the PGMQ project has it too."""
    with reachable_folder("programs") as home, reachable_folder("extension") as folder:
        copied = copy_binaries(chosen_binaries() or find_binaries(), home)
        plpgsql = next(copied.root.rglob("extension/plpgsql.control"), None)
        if plpgsql is None:
            pytest.skip("not run: this server keeps its extensions in a place of the system's")
        for name, text in (("pgmq.control", _CONTROL), (f"pgmq--{VERSION}.sql", shipped_sql())):
            added = plpgsql.with_name(name)
            added.write_text(text, encoding="utf-8")
            added.chmod(0o644)
        settings = {"fsync": "off", "max_connections": "50"}
        with EmbeddedServer(folder, base=folder, explicit=True, settings=settings, binaries=copied) as server:
            yield server

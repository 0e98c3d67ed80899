"""Budgets: connections against what the server grants, memory against the machine, clocks against each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

from shared.sizes import format_size
from supervisor.cli.checks.findings import Finding, fail, ok, warning
from supervisor.cli.handlers import HandlerReport
from supervisor.cli.server import ServerFacts, sessions_needed
from supervisor.config import Config

__all__ = ["check_clock", "check_connections", "check_memory", "machine_memory"]

_CLOCK_TOLERANCE_S = 2.0
_UNLIMITED = 1 << 60  # what cgroup v1 says where there is no limit is far above


def check_connections(config: Config, facts: ServerFacts) -> Iterator[Finding]:
    """Compare what we may need at once with what the server grants, and with what is free now."""
    needed, free = sessions_needed(config), facts.grants - facts.connected
    text = f"up to {needed} needed, {facts.grants} granted, {facts.connected} in use by everybody now"
    remedy = "lower concurrency of transactional queues or [database] pool_size, or raise max_connections"
    if needed > facts.grants:
        yield fail("connections", text, remedy)
    elif needed > free:
        yield warning("connections", text, remedy)
    else:
        yield ok("connections", text)


def check_memory(config: Config, reports: Sequence[HandlerReport]) -> Iterator[Finding]:
    """Compare what the children may take together with what this machine or container has."""
    total = machine_memory()
    sizes = {name: report.rss_bytes for report in reports for name in report.queues}
    needed = allowed = 0
    bounded = True
    for name, queue in config.queues.items():
        children = queue.concurrency + queue.standby
        needed += children * sizes.get(name, 0)
        if queue.memory_limit is None:
            bounded = False
        else:
            allowed += children * queue.memory_limit
    if not config.queues or total is None:
        return
    text = f"children need about {format_size(needed or None)} idle"
    text += f", may take {format_size(allowed)}" if bounded else ", some without a memory_limit"
    text += f"; {format_size(total)} here"
    if needed > total:
        yield fail("memory", text, "lower concurrency, or use a larger machine")
    elif allowed > total:
        yield warning("memory", text, "lower memory_limit or concurrency, so that the kernel need not choose a victim")
    else:
        yield ok("memory", text)


def machine_memory() -> int | None:
    """Bytes of this machine, or of the cgroup where that has less; None where nothing tells."""
    found = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path)
        if text.isdigit() and int(text) < _UNLIMITED:
            found.append(int(text))
    lines = _read("/proc/meminfo").splitlines()
    found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")]
    return min(found, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def check_clock(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Compare the clocks of host and database. Leases do not depend on it; times in logs and dead letters do."""
    before = time.time()
    row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    after = time.time()
    assert row is not None
    offset_s = row[0] - (before + after) / 2
    text = f"the database is {abs(offset_s):.3f} s {'ahead of' if offset_s > 0 else 'behind'} this host"
    if abs(offset_s) > _CLOCK_TOLERANCE_S:
        yield warning("clock", text, "let NTP set both; leases are not affected, times in logs and dead letters are")
    else:
        yield ok("clock", text)

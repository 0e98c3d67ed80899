"""What the benchmarks share: a durable server, a filled queue, a service, and a look at what it cost."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from supervisor.embedded import EmbeddedServer
from supervisor.processes.procfs import read_children
from tests.support.databases import drop_template, fresh_database, make_template
from tests.support.folders import reachable_folder
from tests.support.service import Service

TASKS = Path(__file__).parent


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server with PostgreSQL's own durability settings: those of a real installation."""
    with (
        reachable_folder("bench") as folder,
        EmbeddedServer(folder, base=folder, explicit=True, settings={"max_wal_size": "4GB"}) as embedded,
    ):
        dsn = embedded.dsn()
        make_template(dsn)
        yield dsn
        drop_template(dsn)


@contextlib.contextmanager
def queue(server_dsn: str, *names: str) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    """A fresh database with these queues; gives its DSN and a connection."""
    with fresh_database(server_dsn) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        for name in names:
            connection.execute("SELECT pgmq.create(%s)", (name,))
        yield dsn, connection


def fill(connection: psycopg.Connection[Any], name: str, count: int, *, deadly_every: int = 0) -> None:
    """Send `count` messages; with `deadly_every` n each n-th has a true body."""
    connection.execute(
        "INSERT INTO pgmq.q_" + name + " (vt, message) "  # type: ignore[arg-type] - our own names
        "SELECT clock_timestamp(), to_jsonb(%(every)s > 0 AND n %% greatest(%(every)s, 1) = 0) "
        "FROM generate_series(1, %(count)s) n",
        {"every": deadly_every, "count": count},
    )
    connection.execute("VACUUM ANALYZE pgmq.q_" + name)  # type: ignore[arg-type] - our own names


def length(connection: psycopg.Connection[Any], name: str) -> int:
    """Messages in the queue."""
    row = connection.execute("SELECT count(*) FROM pgmq.q_" + name).fetchone()  # type: ignore[arg-type] - our own names
    return int(row[0]) if row else 0


@contextlib.contextmanager
def service(dsn: str, config: str, **env: str) -> Iterator[Service]:
    """A running supervisor; stopped with TERM at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        running = Service(Path(folder), dsn, config, app_dir=TASKS)
        running.start(env=env)
        try:
            yield running
            running.stop()
        finally:
            running.close()


@dataclass(frozen=True, slots=True)
class Drained:
    """How a queue was worked off."""

    messages: int
    seconds: float
    parent_cpu_s: float

    @property
    def per_second(self) -> float:
        return self.messages / self.seconds


def drain(connection: psycopg.Connection[Any], running: Service, name: str) -> Drained:
    """Watch the service work a queue off."""
    cpu = 0.0

    def look(*, begins: bool) -> None:
        nonlocal cpu
        assert running.process.poll() is None, running.log[-4000:]
        if begins:
            cpu = cpu_s(running.pid)

    messages, seconds = await_empty(connection, name, look, warm=lambda: all_ready(running.pid))
    return Drained(messages, seconds, cpu_s(running.pid) - cpu)


def await_empty(
    connection: psycopg.Connection[Any],
    name: str,
    look: Callable[..., None] | None = None,
    *,
    warm: Callable[[], bool] = lambda: True,
    limit_s: float = 300.0,
) -> tuple[int, float]:
    """Messages and seconds from the first look that finds work done, and all `warm`, to an empty queue.

    A start is not counted: eight interpreters that import take the time of several thousand messages.

    Counting costs the server as much as some hundred messages, so half of what seems to be left is slept through.
    """
    total = before = length(connection, name)
    began = 0.0
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        left = length(connection, name)
        begins = not began and left < total and warm()
        if begins:
            before, began = left, time.monotonic()
        if look is not None:
            look(begins=begins)
        if left == 0:
            return before, time.monotonic() - began
        done = before - left
        left_s = left * (time.monotonic() - began) / done if began and done else 0.0
        time.sleep(min(max(left_s / 2, 0.02), 2.0))
    raise AssertionError(f"{length(connection, name)} of {total} messages left after {limit_s} s")


def all_ready(pid: int) -> bool:
    """Whether every child of a supervisor has a title that says more than that it starts."""
    titles = [Path(f"/proc/{child}/cmdline").read_bytes() for child in read_children(pid)]
    children = [title for title in titles if b"pgmq-guard" not in title and b"guard_main" not in title]
    return all(title.startswith(b"pgmq-child ") and b" starting" not in title for title in children)


def cpu_s(pid: int) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""A running service on a fresh database, with what nearly every end-to-end test needs to look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.support.service import Service
from tests.support.waiting import eventually


class Stage:
    """The service, its database, and its queue `jobs` unless another is named."""

    def __init__(self, service: Service, connection: psycopg.Connection[Any]) -> None:
        self.service = service
        self.connection = connection

    def create(self, *queues: str) -> None:
        """Make queues before the service starts."""
        for queue in queues or ("jobs",):
            self.rows("SELECT pgmq.create(%s)", queue)

    def send(self, *bodies: object, queue: str = "jobs", delay_s: int = 0) -> list[int]:
        """Send bodies as JSON; gives their message ids."""
        texts = [json.dumps(body) for body in bodies]
        rows = self.rows("SELECT pgmq.send_batch(%s, %s::text[]::jsonb[], %s)", queue, texts, delay_s)
        return [row[0] for row in rows]

    def left(self, queue: str = "jobs") -> int:
        """Messages in the queue, in flight and delayed ones too."""
        return int(self.rows(f"SELECT count(*) FROM pgmq.q_{queue}")[0][0])

    def archived(self, queue: str = "jobs") -> list[tuple[Any, int]]:
        """Body and read_ct of what succeeded, where on_success is archive."""
        return [tuple(row) for row in self.rows(f"SELECT message, read_ct FROM pgmq.a_{queue} ORDER BY msg_id")]

    def letters(self, queue: str = "jobs") -> list[dict[str, Any]]:
        """The dead letters, oldest first."""
        return [row[0] for row in self.rows(f"SELECT message FROM pgmq.q_{queue}_dlq ORDER BY msg_id")]

    def rows(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement and fetch all."""
        cursor = self.connection.execute(statement, parameters or None)  # type: ignore[call-overload]
        return list(cursor.fetchall())

    def until_empty(self, queue: str = "jobs", timeout_s: float = 90.0) -> None:
        """Wait until nothing is left in the queue."""
        eventually(lambda: self.left(queue) == 0, timeout_s=timeout_s, what=f"an empty queue {queue}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's entries of one event."""
        lines = self.service.log.splitlines()
        return [json.loads(line) for line in lines if f'"event":"{name}"' in line]


@contextmanager
def stage(folder: Path, dsn: str, config: str, tasks: str) -> Iterator[Stage]:
    """Give a stage whose service is not started; whatever happens, no process of it stays."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        service = Service(folder, dsn, config, tasks=tasks)
        try:
            yield Stage(service, connection)
        finally:
            service.close()


def runs(folder: Path) -> list[tuple[int, int]]:
    """What handlers wrote down at their start, in a file `ran`, a line "message attempt" each."""
    try:
        lines = (folder / "ran").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(msg_id), int(attempt)) for msg_id, attempt in map(str.split, lines)]

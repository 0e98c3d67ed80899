"""What the database must have before anything is claimed: the queues, and where their dead letters go."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from shared.errors import DatabaseError
from supervisor.config import Config


def prepare_queues(config: Config) -> None:
    """Create what is missing and may be created. Raises `DatabaseError`: without a destination there is no start."""
    with psycopg.connect(config.dsn, autocommit=True) as connection:
        present = {name for (name,) in connection.execute("SELECT queue_name FROM pgmq.meta").fetchall()}
        for name, queue in config.queues.items():
            for wanted in (name, queue.to_core(name).dead_letter_queue):
                if wanted in present:
                    continue
                if not queue.create:
                    raise DatabaseError(f"queue {wanted} does not exist", remedy=f"pgmq-supervisor queues create {wanted}")
                connection.execute("SELECT pgmq.create(%s)", (wanted,))


def redrive_letters(config: Config, queue: str, msg_ids: Sequence[int] | None, rate: float | None) -> int:
    """Move dead letters back to their source; how many."""
    del config, queue, msg_ids, rate
    raise DatabaseError("not yet")

"""Blocking work of a running supervisor's database side: making ready before the start, and redriving on request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from supervisor.config import Config
from supervisor.database.admin import Admin, WantedQueue
from supervisor.database.connections import ConnectionOptions, connect_blocking


def wanted_queues(config: Config) -> list[WantedQueue]:
    """The queues of a configuration, as the administration takes them."""
    return [
        WantedQueue(
            name=name,
            dead_letter_queue=queue.dead_letter_queue_of(name),
            storage=queue.storage.value,
            create=queue.create,
            notify=queue.notify,
        )
        for name, queue in config.queues.items()
    ]


def prepare_queues(config: Config) -> list[tuple[str, str]]:
    """Create queues that may be created; gives those that have no notifications, and why.

    Raises a `SupervisorError` where a queue or its dead-letter queue is missing: without a destination there is no
    start (failure model: 'dead-letter move fails').
    """
    with connect_blocking(config.dsn, _options(config), "prepare") as connection:
        return list(Admin(connection).prepare(wanted_queues(config)).notify_failed)


class _Stopped(Exception):
    """Leaves the loop of a redrive between two batches."""


def redrive_letters(
    config: Config, queue: str, msg_ids: Sequence[int] | None, rate: float | None, stop: threading.Event
) -> int:
    """Move dead letters back to their source, at most `rate` a second; how many. Ends early when `stop` is set."""
    moved = 0

    def advanced(count: int) -> None:
        nonlocal moved
        moved = count
        if stop.is_set():
            raise _Stopped

    letters = config.queues[queue].dead_letter_queue_of(queue)
    with connect_blocking(config.dsn, _options(config), "redrive") as connection, contextlib.suppress(_Stopped):
        Admin(connection).redrive(queue, letters, msg_ids, rate=rate, advanced=advanced, sleep=stop.wait)
    return moved


def _options(config: Config) -> ConnectionOptions:
    return ConnectionOptions(
        connect_timeout_s=config.database.connect_timeout,
        statement_timeout_s=config.database.statement_timeout,
        acquire_timeout_s=config.database.acquire_timeout,
    )

"""Blocking work of a running supervisor's database side: making ready before the start, and redriving on request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from shared.errors import SupervisorError
from supervisor.config import Config
from supervisor.database.admin import Admin, WantedQueue
from supervisor.database.connections import ConnectionOptions, connect_blocking

REDRIVE_S: Final = 20.0
"""How long a redrive on request goes on. With its last batch it ends before anybody's patience does."""


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


@dataclass(frozen=True, slots=True)
class Redriven:
    """What became of a redrive on request. `more`: something is left of what was asked for; ask again."""

    moved: int
    skipped: int = 0
    failed: int = 0
    more: bool = False
    error: str | None = None  # what ended it in the middle


def redrive_letters(
    config: Config, queue: str, msg_ids: Sequence[int] | None, rate: float | None, stop: threading.Event
) -> Redriven:
    """Move dead letters back to their source, at most `rate` a second, for as long as somebody waits for an answer.

    Ends early when `stop` is set. Raises a `SupervisorError` where nothing was moved.
    """
    ends_at = monotonic() + REDRIVE_S
    moved = 0

    def advanced(count: int) -> None:
        nonlocal moved
        moved = count

    def enough() -> bool:
        return stop.is_set() or monotonic() >= ends_at

    def sleep(seconds: float) -> None:
        stop.wait(min(seconds, max(0.0, ends_at - monotonic())))

    letters = config.queues[queue].dead_letter_queue_of(queue)
    options = _options(config)
    options = replace(
        options,
        connect_timeout_s=min(options.connect_timeout_s, REDRIVE_S / 2),
        statement_timeout_s=min(options.statement_timeout_s, REDRIVE_S),
    )
    try:
        with connect_blocking(config.dsn, options, "redrive") as connection:
            result = Admin(connection).redrive(
                queue, letters, msg_ids, rate=rate, advanced=advanced, sleep=sleep, enough=enough
            )
    except SupervisorError as error:
        if not moved:
            raise
        return Redriven(moved, more=True, error=error.message)
    return Redriven(moved, len(result.skipped), len(result.failed), result.more)


def _options(config: Config) -> ConnectionOptions:
    return ConnectionOptions(
        connect_timeout_s=config.database.connect_timeout,
        statement_timeout_s=config.database.statement_timeout,
        acquire_timeout_s=config.database.acquire_timeout,
    )

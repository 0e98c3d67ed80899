"""What is allowed and probably not meant. `check` shows it as warnings; nothing is refused for it."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from shared.durations import format_duration
from supervisor.config.config import Config
from supervisor.config.models import QueueSection
from supervisor.config.rules import Breach
from supervisor.core.types import Mode

__all__ = ["advise"]

_SLOW_POLL_S = 60.0
_SHORT_LEASE_S = 5.0


def advise(config: Config) -> Iterator[Breach]:
    """Everything unwise in a configuration that can work."""
    yield from _http(config)
    for name, queue in config.queues.items():
        yield from _queue(name, queue)
    yield from _dead_letter_queues(config)


def _advice(path: tuple[str, ...], reason: str, remedy: str) -> Breach:
    return Breach(path, frozenset({path}), reason, remedy)


def _http(config: Config) -> Iterator[Breach]:
    if config.http is not None and config.http.token is None and not _is_loopback(config.http.host):
        yield _advice(
            ("http", "host"),
            "others can reach status and metrics, and no token is configured",
            'keep "127.0.0.1", or let a proxy in front decide who may read',
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _queue(name: str, queue: QueueSection) -> Iterator[Breach]:
    if queue.hard_timeout is None:
        yield _advice(
            ("queues", name, "hard_timeout"),
            "a handler that hangs holds its child for ever",
            'set a limit that no healthy message reaches, such as "30m"',
        )
    if queue.visibility_timeout < _SHORT_LEASE_S:
        yield _advice(
            ("queues", name, "visibility_timeout"),
            f"an outage of {format_duration(queue.visibility_timeout)} costs every running message its lease",
            'write "30s" or more; a longer lease delays only what a killed supervisor held',
        )
    if queue.max_deaths > queue.max_attempts:
        yield _advice(
            ("queues", name, "max_deaths"),
            f"is never reached: max_attempts ({queue.max_attempts}) ends a message before",
            f"write at most {queue.max_attempts}, or raise max_attempts",
        )
    if not queue.notify and queue.polling_interval >= _SLOW_POLL_S:
        yield _advice(
            ("queues", name, "polling_interval"),
            "without notify a message waits this long for its start",
            "turn notify on, or poll more often",
        )
    if queue.mode is Mode.TRANSACTIONAL and queue.max_in_flight is not None:
        yield _advice(
            ("queues", name, "max_in_flight"),
            "has no effect in transactional mode: a child claims for itself",
            "leave it out; concurrency is the limit",
        )


def _dead_letter_queues(config: Config) -> Iterator[Breach]:
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for name, queue in config.queues.items():
        owners[queue.dead_letter_queue_of(name)].append(name)
    for target, names in owners.items():
        path = ("queues", names[-1], "dead_letter_queue")
        if len(names) > 1:
            yield _advice(
                path,
                f"is shared by {', '.join(names)}: counts of it, and `queues purge`, concern them all",
                "leave the key out, each queue then has its own",
            )
        if target in config.queues:
            yield _advice(
                path,
                f'"{target}" is also a queue with a handler: dead letters are handled, and cannot be redriven',
                "leave the key out unless this is what you want",
            )

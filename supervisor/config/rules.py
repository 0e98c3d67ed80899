"""What cannot work although each key for itself could: impossibilities between keys, and between queues.

A rule names the keys that it looked at, so that it stays silent where one of them was already refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shared.durations import format_duration
from shared.naming import dead_letter_queue_name
from supervisor.config.models import ControlSection, QueueSection
from supervisor.config.problems import Path

__all__ = ["Breach", "control_breaches", "queue_breaches", "queues_breaches"]

_MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path on Linux, without the closing NUL
_MAX_CHILDREN = 1000


class Breach(NamedTuple):
    """A rule that does not hold: at which key, looking at which others, why, and what to do."""

    path: Path
    looked_at: frozenset[Path]
    reason: str
    remedy: str


def queue_breaches(name: str, queue: QueueSection) -> Iterator[Breach]:
    """What contradicts itself within one queue."""

    def breach(key: str, others: tuple[str, ...], reason: str, remedy: str) -> Breach:
        looked_at = frozenset(("queues", name, *part.split(".")) for part in (key, *others))
        return Breach(("queues", name, *key.split(".")), looked_at, reason, remedy)

    if queue.visibility_timeout < 1:
        yield breach(
            "visibility_timeout",
            (),
            "is below 1 s: a lease that short cannot be renewed in time",
            'write at least "1s"; "30s" suits most, running handlers have their lease renewed',
        )
    soft, hard = queue.soft_timeout, queue.hard_timeout
    if soft is not None and hard is not None and soft >= hard:
        yield breach(
            "soft_timeout",
            ("hard_timeout",),
            f"is not below hard_timeout ({format_duration(hard)}): the stop request would come after the kill",
            f"choose a soft_timeout below {format_duration(hard)}, or a longer hard_timeout",
        )
    if queue.max_in_flight is not None and queue.max_in_flight < queue.concurrency:
        yield breach(
            "max_in_flight",
            ("concurrency",),
            f"is below concurrency ({queue.concurrency}): some children could never get a message",
            f'write "auto" or at least {queue.concurrency}',
        )
    if queue.retry.max < queue.retry.base:
        yield breach(
            "retry.max",
            ("retry.base",),
            f"is below retry.base ({format_duration(queue.retry.base)})",
            f"write at least {format_duration(queue.retry.base)}, or a smaller base",
        )
    if queue.dead_letter_queue == name:
        yield breach(
            "dead_letter_queue",
            (),
            "is the queue itself: a dead letter would be handled again, for ever",
            f'leave the key out to use "{dead_letter_queue_name(name)}"',
        )


def queues_breaches(queues: Mapping[str, QueueSection]) -> Iterator[Breach]:
    """What contradicts itself between queues: a ring of dead-letter queues, more children than a machine runs."""
    reported: set[str] = set()
    for start in queues:
        ring = _ring(start, queues)
        if len(ring) > 1 and not reported.intersection(ring):
            reported.update(ring)
            path = ("queues", start, "dead_letter_queue")
            looked_at = frozenset(("queues", name, "dead_letter_queue") for name in ring)
            way = " -> ".join((*ring, start))
            yield Breach(
                path,
                looked_at,
                f"closes a ring of dead-letter queues ({way}): a dead letter would go round for ever",
                "let the last of them use a dead-letter queue that is no queue of this configuration",
            )
    total = sum(queue.concurrency + queue.standby for queue in queues.values())
    if total > _MAX_CHILDREN and len(queues) > 1:
        looked_at = frozenset(("queues", name, key) for name in queues for key in ("concurrency", "standby"))
        yield Breach(
            ("queues",),
            looked_at,
            f"ask for {total} children together, one supervisor runs at most {_MAX_CHILDREN}",
            "lower concurrency, or give some queues to another supervisor",
        )


def _ring(start: str, queues: Mapping[str, QueueSection]) -> tuple[str, ...]:
    """The queues on the way from `start` along dead-letter queues back to it; empty where it does not come back."""
    way = [start]
    while (following := queues[way[-1]].dead_letter_queue_of(way[-1])) in queues:
        if following == start:
            return tuple(way)
        if following in way:
            return ()
        way.append(following)
    return ()


def control_breaches(control: ControlSection) -> Iterator[Breach]:
    """What the kernel would refuse."""
    if control.socket is not None and len(control.socket.encode()) > _MAX_SOCKET_PATH:
        path = ("control", "socket")
        yield Breach(
            path,
            frozenset({path}),
            f"is longer than {_MAX_SOCKET_PATH} bytes, which no Unix socket's path can be",
            "choose a shorter path, for example below /run",
        )

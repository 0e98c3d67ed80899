"""The driver: in which order the core hears, and that it hears of every standstill first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast, get_args

import pytest

from supervisor.core.commands import Command
from supervisor.core.core import Core
from supervisor.core.events import Event, Notified, StoodStill
from supervisor.core.types import QueueName
from supervisor.driver import Driver

FIRST, SECOND = Notified(QueueName("first")), Notified(QueueName("second"))


class Listener:
    """In place of the core: writes down what it is told, and has no deadline."""

    def __init__(self) -> None:
        self.heard: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> list[Any]:
        self.heard.append((event, now))
        return []

    def next_deadline(self) -> float:
        return float("inf")


async def _hear(times: Iterator[float], *events: Event) -> list[tuple[Event, float]]:
    """What the core hears of events that were posted together, by a clock that gives these times."""
    core = Listener()
    failures: list[BaseException] = []
    driver = Driver(
        cast(Core, core),
        clock=lambda: next(times),
        executors=dict.fromkeys(get_args(Command), lambda _: None),
        tell=lambda _: None,
        failed=failures.append,
    )
    for event in events:
        driver.post(event)
    driver._run()
    driver.close()
    assert not failures
    return core.heard


async def test_events_are_heard_in_order() -> None:
    """Nothing stood still."""
    assert await _hear(iter([0.0, 1.0, 2.0]), FIRST, SECOND) == [(FIRST, 1.0), (SECOND, 2.0)]


@pytest.mark.parametrize(
    ("times", "heard"),
    [
        ([0.0, 7.0, 7.0, 7.0], [(StoodStill(7.0), 7.0), (FIRST, 7.0), (SECOND, 7.0)]),
        ([0.0, 1.0, 8.0, 8.0], [(FIRST, 1.0), (StoodStill(7.0), 8.0), (SECOND, 8.0)]),
    ],
    ids=["before-the-turn", "in-the-turn"],
)
async def test_a_standstill_is_heard_of_before_anything_is_judged_by_the_clock(
    times: list[float], heard: list[tuple[Event, float]]
) -> None:
    """A process can be stopped between any two of its instructions, also while it has events in hand."""
    assert await _hear(iter(times), FIRST, SECOND) == heard

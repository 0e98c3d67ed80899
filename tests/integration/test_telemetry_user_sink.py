"""The user's sink: a real process that calls a real function, and every way in which that can go wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.core import happenings as h
from supervisor.core.types import QueueName
from supervisor.telemetry.user_sink import UserSink
from tests.support.waiting import eventually

EVENT = h.LeaseLost(QueueName("orders"), 5, "gone")
SINK = """
import json, os, sys, time

def write(record):
    with open({out!r}, "a") as file:
        file.write(json.dumps(record) + "\\n")

def fail(record):
    raise ValueError("no")

def leave(record):
    sys.exit("bye")

def die(record):
    write(record)
    os._exit(9)

def hang(record):
    write(record)
    time.sleep(3600)

def shout(record):
    print("x" * 100000)
    write(record)
"""


class World:
    """An application with sinks, and what became of the events."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.app = folder / "app"
        self.app.mkdir()
        # Names of ours belong to the application here.
        (self.app / "supervisor.py").write_text(SINK.format(out=str(self.out)))
        self.dropped = 0
        self.failures: list[str] = []
        self.sinks: list[UserSink] = []

    def sink(self, function: str, *, stuck_s: float = 5.0) -> UserSink:
        """Start a sink."""
        sink = UserSink(
            f"supervisor:{function}", app_dir=str(self.app), on_dropped=self._drop, on_failed=self.failures.append,
            stuck_s=stuck_s,
        )  # fmt: skip
        self.sinks.append(sink)
        return sink

    def records(self) -> list[dict[str, object]]:
        """What arrived."""
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def _drop(self, count: int) -> None:
        self.dropped += count


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world whose sinks end with the test."""
    world = World(tmp_path)
    yield world
    for sink in world.sinks:
        sink.close()


def test_events_arrive_in_order_as_plain_records(world: World) -> None:
    """A module of the application may have the name of ours."""
    sink = world.sink("write")
    for number in range(1000):
        sink.happened(h.LeaseLost(QueueName("orders"), number, "gone"))
    sink.close()
    records = world.records()
    assert [record["msg_id"] for record in records] == list(range(1000))
    assert records[0]["event"] == "lease.lost"
    assert world.dropped == 0


@pytest.mark.parametrize("function", ["fail", "leave"])
def test_what_a_sink_raises_is_counted_and_the_next_event_follows(world: World, function: str) -> None:
    """Even SystemExit costs one event only."""
    sink = world.sink(function)
    sink.happened(EVENT)
    sink.happened(EVENT)
    sink.close()
    assert world.dropped == 2
    assert any(word in world.failures[0] for word in ("ValueError", "SystemExit"))


@pytest.mark.parametrize("function", ["nothing", "SINK"])
def test_a_sink_that_does_not_exist_is_said(world: World, function: str) -> None:
    """The supervisor runs on without it."""
    world.sink(function)
    eventually(lambda: any("cannot import" in failure for failure in world.failures))


def test_a_sink_that_dies_is_started_again(world: World) -> None:
    """With a pause in between."""
    sink = world.sink("die")
    sink.happened(EVENT)
    eventually(lambda: any("status 9" in failure for failure in world.failures))
    sink.happened(EVENT)
    eventually(lambda: len(world.records()) == 2)


def test_a_sink_that_hangs_costs_events_only(world: World) -> None:
    """The queue is bounded, nothing waits, what is lost is counted."""
    sink = world.sink("hang", stuck_s=0.2)
    sink.happened(EVENT)
    eventually(world.records)
    for _ in range(50_000):
        sink.happened(EVENT)
    eventually(lambda: any("takes no events" in failure for failure in world.failures))
    assert len(sink._queue) <= 10_000
    eventually(lambda: world.dropped)


def test_what_a_sink_prints_cannot_block_it(world: World) -> None:
    """Its output goes where the log goes, not back to us."""
    sink = world.sink("shout")
    sink.happened(EVENT)
    sink.close()
    assert len(world.records()) == 1


def test_a_signal_to_the_group_does_not_end_it(world: World) -> None:
    """Events of the shutdown still arrive after Ctrl-C."""
    sink = world.sink("write")
    sink.happened(EVENT)
    eventually(world.records)
    process = sink._process
    assert process is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.pid, number)
    sink.happened(EVENT)
    sink.close()
    assert len(world.records()) == 2


def test_closing_leaves_no_process(world: World) -> None:
    """Also when the sink hangs."""
    sink = world.sink("hang")
    sink.happened(EVENT)
    eventually(world.records)
    process = sink._process
    assert process is not None
    sink.close()
    assert process.poll() is not None

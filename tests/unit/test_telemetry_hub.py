"""The hub: every happening reaches who wants it, nobody who fails hurts anybody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.core import happenings as h
from supervisor.core.types import ChildId, DeathCause, DeathFacts, QueueName
from supervisor.telemetry import facts as f
from supervisor.telemetry.catalogue import CATALOGUE, HAPPENINGS, OTHER_EVENTS, level_of
from supervisor.telemetry.deaths import RecentDeaths
from supervisor.telemetry.hub import Hub
from supervisor.telemetry.log import LogSink
from supervisor.telemetry.metrics import MetricsSink
from supervisor.telemetry.records import sink_record

ORDERS = QueueName("orders")
FACTS = DeathFacts(None, "SIGKILL", 10, 0.1, "", "tail")


class Lines:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []

    def write(self, line: bytes) -> None:
        """Take a line."""
        self.records.append(json.loads(line))


class Sink:
    """Keeps what it is told, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.told: list[f.AnyHappening] = []
        self.fails = fails

    def happened(self, happening: f.AnyHappening) -> None:
        """Take one."""
        if self.fails:
            raise RuntimeError("sink")
        self.told.append(happening)


@pytest.fixture
def lines() -> Lines:
    """What was logged."""
    return Lines()


def hub_of(lines: Lines, user: Sink | None = None) -> Hub:
    """A hub of real sinks."""
    return Hub(metrics=MetricsSink(["orders"]), log=LogSink(lines, console=False), user=user, wall=lambda: 1.0)


def ended(cause: DeathCause = DeathCause.SIGNAL) -> h.ChildEnded:
    """A child's end."""
    return h.ChildEnded(ORDERS, ChildId(3), 1, 77, cause, FACTS, 9, 2, charged=True)


class TestCatalogue:
    def test_every_happening_has_an_entry(self) -> None:
        """The core cannot tell what the log does not know."""
        assert [kind.__name__ for kind in HAPPENINGS if kind not in CATALOGUE] == []

    def test_names_are_unique(self) -> None:
        """An event's name leads to one paragraph of the docs."""
        names = [entry.event for entry in CATALOGUE.values()] + list(OTHER_EVENTS)
        assert len(names) == len(set(names))

    def test_every_event_is_explained_in_the_docs(self) -> None:
        """Who reads a line at night finds what to do about it."""
        text = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
        names = {entry.event for entry in CATALOGUE.values()} | set(OTHER_EVENTS)
        assert sorted(name for name in names if f"`{name}`" not in text) == []

    def test_a_level_is_never_below_the_catalogues(self) -> None:
        """Routing by the catalogue's level loses nothing."""
        for cause in DeathCause:
            assert level_of(ended(cause)) >= CATALOGUE[h.ChildEnded].level
        for reason in ("error", "requested", "deadlock", "signal"):
            retried = h.MessageRetried(ORDERS, 1, 1, reason, 0, None, None)
            assert level_of(retried) >= CATALOGUE[h.MessageRetried].level


class TestFanOut:
    def test_every_sink_is_told(self, lines: Lines) -> None:
        """Log, metrics, deaths and the user's sink hear of a death."""
        user = Sink()
        hub = hub_of(lines, user)
        hub.happened(ended())
        assert lines.records[0]["event"] == "child.ended"
        assert hub.metrics.of("orders").child_deaths["signal"] == 1
        assert hub.deaths.latest()[0].signal == "SIGKILL"
        assert user.told == [ended()]

    def test_a_sink_that_fails_is_swallowed_counted_and_said_once(self, lines: Lines) -> None:
        """Metrics and log work on; the work never notices."""
        hub = hub_of(lines, Sink(fails=True))
        for _ in range(5):
            hub.happened(h.MessageSucceeded(ORDERS, 1, 1, 0.1, 0.1))
        assert hub.metrics.events_dropped == 5
        assert hub.metrics.of("orders").messages_succeeded == 5
        assert [record["event"] for record in lines.records] == ["telemetry.sink_failed"]

    def test_a_log_that_fails_is_swallowed_too(self) -> None:
        """Even saying so fails, and nothing comes of it."""

        class Broken:
            def write(self, line: bytes) -> None:
                raise OSError(line)

        hub = Hub(metrics=MetricsSink([]), log=LogSink(Broken(), console=False))
        hub.happened(ended())
        hub.child_output(3, 1, "output", "text")
        assert hub.metrics.events_dropped >= 2

    def test_bodies_are_in_no_happening(self) -> None:
        """What the log cannot get it cannot leak."""
        names = {name for kind in CATALOGUE for name in kind.__dataclass_fields__}
        assert names & {"body", "headers", "raw", "message", "envelope"} == set()


class TestChildrensOutput:
    def test_a_line_names_queue_slot_process_and_message(self, lines: Lines) -> None:
        """What the processes report by child is shown by message."""
        hub = hub_of(lines)
        hub.happened(h.ChildStarting(ORDERS, ChildId(3), 1, 1))
        hub.happened(h.ChildBecameReady(ORDERS, ChildId(3), 1, 77, 0.1))
        hub.happened(h.MessageStartedRunning(ORDERS, 9, 2, ChildId(3), 77, None))
        hub.child_output(3, 55, "output", "hello")
        record = lines.records[-1]
        fields = ("queue", "slot", "pid", "msg_id", "attempt", "line")
        assert [record[name] for name in fields] == ["orders", 1, 77, 9, 2, "hello"]

    def test_a_line_between_messages_names_none(self, lines: Lines) -> None:
        """An idle child's output is not blamed on the last message."""
        hub = hub_of(lines)
        hub.happened(h.ChildStarting(ORDERS, ChildId(3), 1, 1))
        hub.happened(h.MessageStartedRunning(ORDERS, 9, 2, ChildId(3), 77, None))
        hub.child_output(3, None, "output", "hello")
        assert "msg_id" not in lines.records[-1]

    def test_an_ended_child_is_forgotten(self, lines: Lines) -> None:
        """Thousands of restarts leave nothing behind."""
        hub = hub_of(lines)
        hub.happened(h.ChildStarting(ORDERS, ChildId(3), 1, 1))
        hub.happened(h.MessageStartedRunning(ORDERS, 9, 2, ChildId(3), 77, None))
        hub.happened(ended())
        assert (hub._children, hub._current) == ({}, {})


class TestDeaths:
    def test_the_last_ones_are_kept_latest_first(self) -> None:
        """A ring: memory is bounded."""
        deaths = RecentDeaths(keep=3)
        for number in range(10):
            deaths.add(ended(), at=float(number))
        assert [death.at for death in deaths.latest()] == [9.0, 8.0, 7.0]

    def test_retired_children_are_none(self) -> None:
        """Recycling fills no list of deaths."""
        deaths = RecentDeaths()
        deaths.add(ended(DeathCause.RETIRED), at=0.0)
        assert deaths.latest() == []


def test_a_record_for_the_users_sink_is_flat_and_plain() -> None:
    """It survives JSON."""
    record = sink_record(ended(), at=5.0)
    assert json.loads(json.dumps(record)) == record
    assert record["event"] == "child.ended"
    assert record["time"] == 5.0
    assert record["cause"] == "signal"

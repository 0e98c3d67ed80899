"""Our metrics: the names that users rely on, and what moves them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from supervisor.core import happenings as h
from supervisor.core.snapshot import ChildSnapshot, QueueSnapshot, Snapshot
from supervisor.core.types import ChildId, DeadLetterReason, DeathCause, DeathFacts, QueueName
from supervisor.telemetry import facts as f
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.exposition import PREFIX, SupervisorCollector, metric_names
from supervisor.telemetry.metrics import MetricsSink
from supervisor.telemetry.render import Renderer

ORDERS = QueueName("orders")
FACTS = DeathFacts(1, None, 0, 0.0, "", "")
CONTRACT_NAMES = """
messages_claimed_total messages_succeeded_total messages_retried_total messages_dead_lettered_total
messages_abandoned_total messages_released_total leases_renewed_total lease_renewal_failures_total leases_lost_total
child_starts_total child_deaths_total processes_swept_total database_reconnects_total listener_reconnects_total
notify_setup_failures_total notify_repairs_total wakeups_total events_dropped_total shutdown_timeouts_total in_flight
pending children queue_visible queue_oldest_visible_seconds seconds_since_claim_attempt handler_running_seconds_max
handler_seconds queue_wait_seconds settle_seconds shutdown_seconds
"""
CONTRACT = CONTRACT_NAMES.split()
LABELS = {
    "messages_retried_total": "reason", "messages_dead_lettered_total": "reason", "child_deaths_total": "cause",
    "wakeups_total": "source", "children": "state",
}  # fmt: skip


def child(**changes: object) -> ChildSnapshot:
    """A busy child."""
    values: dict[str, object] = {
        "child": 1, "slot": 0, "incarnation": 1, "role": "active", "state": "busy", "pid": 7, "since": 0.0,
        "messages": 0, "msg_id": 5, "attempt": 1, "running_since": 90.0, "stop_reason": None, "progress": None,
        "tree_bytes": None,
    }  # fmt: skip
    return ChildSnapshot(**(values | changes))  # type: ignore[arg-type]


def queue(**changes: object) -> QueueSnapshot:
    """A queue at work."""
    values: dict[str, object] = {
        "queue": "orders", "mode": "regular", "handler": "a:b", "concurrency": 1, "paused": False, "parked": None,
        "waiting": 2, "in_flight": 3, "settling": 0, "owed": 0, "held_bytes": 0, "claims_attempted_at": 97.0,
        "database_error": None, "listener_up": True, "lease_margin_s": None, "overdue_renewals": 0,
        "handler_ewma_s": None, "children": (child(),),
    }  # fmt: skip
    return QueueSnapshot(**(values | changes))  # type: ignore[arg-type]


def snapshot(*queues: QueueSnapshot, state: str = "running") -> Snapshot:
    """A supervisor at 100 s."""
    return Snapshot(state=state, now=100.0, started_at=0.0, reloading=False, queues=queues or (queue(),))


@pytest.fixture
def sink() -> MetricsSink:
    """The counters."""
    return MetricsSink(["orders"])


def collected(sink: MetricsSink, counts: dict[str, QueueCounts] | None = None) -> CollectorRegistry:
    """A registry of its own, as a scrape sees it."""
    registry = CollectorRegistry()
    registry.register(SupervisorCollector(sink, snapshot=snapshot, counts=lambda: counts or {}))
    return registry


def value(sink: MetricsSink, name: str, **labels: str) -> float | None:
    """One sample."""
    return collected(sink).get_sample_value(PREFIX + name, {"queue": "orders", **labels})


def tell(sink: MetricsSink, happening: f.AnyHappening) -> None:
    """Count one happening."""
    sink.routes[type(happening)](happening)


class TestNames:
    def test_they_are_exactly_those_of_the_contract(self) -> None:
        """Dashboards depend on each of them, and on none besides."""
        assert sorted(metric_names()) == sorted(PREFIX + name for name in CONTRACT)

    def test_every_name_is_in_the_exposition_with_its_labels_only(self, sink: MetricsSink) -> None:
        """The label is `queue`, and no others than those named."""
        counts = {"orders": QueueCounts(visible=1, oldest_visible_s=2.0)}
        labels: dict[str, set[str]] = {}
        for family in collected(sink, counts).collect():
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                for suffix in ("_bucket", "_count", "_sum"):
                    name = name.removesuffix(suffix)
                labels.setdefault(name, set()).update(set(sample.labels) - {"le"})
        assert sorted(labels) == sorted(CONTRACT)
        for name, found in labels.items():
            assert found <= {"queue", LABELS.get(name, "queue")}, name
            if name in LABELS:
                assert LABELS[name] in found

    def test_every_name_is_explained_in_the_docs(self) -> None:
        """Who is woken by an alert finds the metric's page."""
        pages = Path(__file__).resolve().parents[2] / "docs"
        for page in ("metrics.md", "operations.md"):
            text = (pages / page).read_text()
            assert [name for name in CONTRACT if name not in text] == [], page

    async def test_both_formats_can_be_parsed(self, sink: MetricsSink) -> None:
        """The library's own parsers accept what is served."""
        ours = SupervisorCollector(sink, snapshot=snapshot, counts=dict)
        tell(sink, h.MessageSucceeded(ORDERS, 1, 1, 0.5, 0.01))
        renderer = Renderer(ours, None)
        text = await renderer.render(as_openmetrics=False)
        openmetrics = await renderer.render(as_openmetrics=True)
        assert len(list(parse_text(text.body.decode()))) == len(list(parse_openmetrics(openmetrics.body.decode())))
        assert text.content_type.startswith("text/plain")
        assert openmetrics.content_type.startswith("application/openmetrics-text")


class TestCounters:
    def test_all_begin_at_zero(self, sink: MetricsSink) -> None:
        """A rate exists from the first event on."""
        assert value(sink, "messages_succeeded_total") == 0
        assert value(sink, "child_deaths_total", cause="oom") == 0
        assert value(sink, "messages_dead_lettered_total", reason="died") == 0
        assert value(sink, "wakeups_total", source="notify") == 0

    @pytest.mark.parametrize(
        ("happening", "name", "labels", "grows"),
        [
            (h.MessagesClaimed(ORDERS, 7), "messages_claimed_total", {}, 7),
            (h.MessageSucceeded(ORDERS, 1, 1, 0.1, 0.1), "messages_succeeded_total", {}, 1),
            (h.MessageRetried(ORDERS, 1, 1, "error", 5, None, None), "messages_retried_total", {"reason": "error"}, 1),
            (h.MessageRetried(ORDERS, 1, 1, "new", 5, None, None), "messages_retried_total", {"reason": "new"}, 1),
            (
                h.MessageDeadLettered(ORDERS, 1, 1, DeadLetterReason.DIED, None, None),
                "messages_dead_lettered_total", {"reason": "died"}, 1,
            ),
            (h.MessageAbandoned(ORDERS, 1, 1), "messages_abandoned_total", {}, 1),
            (h.MessageReleased(ORDERS, 1, "drain"), "messages_released_total", {}, 1),
            (h.LeasesRenewed(ORDERS, 4), "leases_renewed_total", {}, 4),
            (h.LeaseRenewalFailed(ORDERS, "x"), "lease_renewal_failures_total", {}, 1),
            (h.LeaseLost(ORDERS, 1, "x"), "leases_lost_total", {}, 1),
            (h.ChildStarting(ORDERS, ChildId(1), 0, 1), "child_starts_total", {}, 1),
            (
                h.ChildEnded(ORDERS, ChildId(1), 0, 1, DeathCause.OOM, FACTS, 1, 1, charged=True),
                "child_deaths_total", {"cause": "oom"}, 1,
            ),
            (f.ProcessesSwept("orders", 3), "processes_swept_total", {}, 3),
            (f.NotifySetupFailed("orders", "denied"), "notify_setup_failures_total", {}, 1),
            (f.NotifyRepaired("orders", "trigger"), "notify_repairs_total", {}, 1),
            (h.WokenUp(ORDERS, "timer"), "wakeups_total", {"source": "timer"}, 1),
        ],
    )  # fmt: skip
    def test_a_happening_moves_its_counter(
        self, sink: MetricsSink, happening: f.AnyHappening, name: str, labels: dict[str, str], grows: int
    ) -> None:
        """Each counter has its happening."""
        tell(sink, happening)
        assert value(sink, name, **labels) == grows

    def test_reconnects_and_shutdowns_belong_to_no_queue(self, sink: MetricsSink) -> None:
        """They have no label."""
        tell(sink, f.DatabaseReconnected("claims"))
        tell(sink, f.ListenerReconnected(2))
        tell(sink, h.ShutdownEnded(timed_out=True, killed=1, took_s=3.0))
        registry = collected(sink)
        for name in ("database_reconnects_total", "listener_reconnects_total", "shutdown_timeouts_total"):
            assert registry.get_sample_value(PREFIX + name) == 1
        assert registry.get_sample_value(PREFIX + "shutdown_seconds_sum") == 3.0

    def test_a_child_that_retires_is_no_death(self, sink: MetricsSink) -> None:
        """Recycling must not look like trouble."""
        tell(sink, h.ChildEnded(ORDERS, ChildId(1), 0, 1, DeathCause.RETIRED, FACTS, None, None, charged=False))
        assert sum(sink.of("orders").child_deaths.values()) == 0

    def test_an_unannounced_queue_is_counted_too(self, sink: MetricsSink) -> None:
        """Nothing raises in the hot path."""
        tell(sink, h.MessagesClaimed(QueueName("surprise"), 1))
        assert sink.of("surprise").messages_claimed == 1


class TestGaugesAndHistograms:
    def test_gauges_come_from_the_snapshot(self, sink: MetricsSink) -> None:
        """Ages count to the snapshot's own now."""
        assert value(sink, "in_flight") == 3
        assert value(sink, "pending") == 2
        assert value(sink, "seconds_since_claim_attempt") == 3.0
        assert value(sink, "handler_running_seconds_max") == 10.0
        assert value(sink, "children", state="busy") == 1
        assert value(sink, "children", state="idle") == 0

    def test_queue_gauges_are_absent_without_a_sample(self, sink: MetricsSink) -> None:
        """An unknown depth is not zero: a scaler must not act on it."""
        assert value(sink, "queue_visible") is None
        registry = collected(sink, {"orders": QueueCounts(visible=12, oldest_visible_s=None)})
        assert registry.get_sample_value(PREFIX + "queue_visible", {"queue": "orders"}) == 12
        assert registry.get_sample_value(PREFIX + "queue_oldest_visible_seconds", {"queue": "orders"}) == 0

    def test_buckets_contain_those_below(self, sink: MetricsSink) -> None:
        """Bounds are inclusive, the last bucket has everything."""
        for seconds in (0.0, 0.001, 0.3, 5000.0):
            tell(sink, h.MessageSucceeded(ORDERS, 1, 1, seconds, 0.0))
        assert value(sink, "handler_seconds_bucket", le="0.001") == 2
        assert value(sink, "handler_seconds_bucket", le="0.5") == 3
        assert value(sink, "handler_seconds_bucket", le="+Inf") == 4
        assert value(sink, "handler_seconds_count") == 4
        assert value(sink, "handler_seconds_sum") == pytest.approx(5000.301)

    def test_failed_runs_have_a_duration_too(self, sink: MetricsSink) -> None:
        """A handler that fails after an hour was running for an hour."""
        tell(sink, h.MessageRetried(ORDERS, 1, 1, "error", 5, None, 2.0))
        tell(sink, h.MessageDeadLettered(ORDERS, 1, 1, DeadLetterReason.FAILED, None, 3.0))
        assert value(sink, "handler_seconds_count") == 2

    def test_a_clock_that_went_back_is_zero(self, sink: MetricsSink) -> None:
        """The wait is measured between two clocks of the database; it never becomes negative."""
        tell(sink, h.MessageStartedRunning(ORDERS, 1, 1, ChildId(1), 7, -0.5))
        assert value(sink, "queue_wait_seconds_sum") == 0
        assert value(sink, "queue_wait_seconds_count") == 1

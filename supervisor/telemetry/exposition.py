"""Our metrics for prometheus_client: counters of the sink, gauges of the core's snapshot, samples of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from supervisor.core.snapshot import QueueSnapshot, Snapshot
from supervisor.core.states import ChildState
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.metrics import Distribution, MetricsSink

PREFIX: Final = "pgmq_supervisor_"

# Name without prefix and `_total` → help. One label, `queue`.
QUEUE_COUNTERS: Final = {
    "messages_claimed": "Messages claimed in regular mode, or inside a child's transaction.",
    "messages_succeeded": "Messages whose success PostgreSQL confirmed.",
    "messages_abandoned": "Messages that their handler left unsettled.",
    "messages_released": "Messages given back without a charge.",
    "leases_renewed": "Lease renewals that held.",
    "lease_renewal_failures": "Renewal statements that failed.",
    "leases_lost": "Leases that somebody else owns now, or that ran out.",
    "child_starts": "Child processes started.",
    "processes_swept": "Processes that outlived the handler that started them, killed.",
    "notify_setup_failures": "Notifications could not be set up.",
    "notify_repairs": "Broken notifications that were repaired.",
}
# ... and one more label.
LABELLED_COUNTERS: Final = {
    "messages_retried": ("reason", "Failed attempts that will be tried again."),
    "messages_dead_lettered": ("reason", "Messages moved to the dead-letter queue."),
    "child_deaths": ("cause", "Children that ended without being asked to retire."),
    "wakeups": ("source", "Reads that were started by a notification, the poll, or a timer."),
}
GLOBAL_COUNTERS: Final = {
    "database_reconnects": "Database connections that were replaced.",
    "listener_reconnects": "Listening connections that were replaced.",
    "events_dropped": "Log lines, events and metrics files that telemetry lost.",
    "shutdown_timeouts": "Shutdowns that had to kill children.",
}
QUEUE_GAUGES: Final = {
    "in_flight": "Messages claimed and not yet settled.",
    "pending": "Messages claimed and not yet given to a child.",
    "seconds_since_claim_attempt": "Age of the last attempt to claim.",
    "handler_running_seconds_max": "How long the longest running handler has been running.",
    "queue_visible": "Messages that could be claimed now, by the last sample; counted up to a limit.",
    "queue_oldest_visible_seconds": "How long the oldest of them has been visible, by the last sample.",
}
CHILDREN_HELP: Final = "Child processes by state."
QUEUE_HISTOGRAMS: Final = {
    "handler_seconds": "Duration of a handler's run.",
    "queue_wait_seconds": "From visible to the start of the handler, by the database's clock.",
    "settle_seconds": "From a handler's end to PostgreSQL's confirmation.",
}
SHUTDOWN_HELP: Final = "Duration of a shutdown."

SnapshotSource = Callable[[], Snapshot | None]
CountsSource = Callable[[], Mapping[str, QueueCounts]]


def metric_names() -> tuple[str, ...]:
    """All names as they are written in the exposition, without the suffixes of histograms."""
    counters = [*QUEUE_COUNTERS, *LABELLED_COUNTERS, *GLOBAL_COUNTERS]
    others = [*QUEUE_GAUGES, "children", *QUEUE_HISTOGRAMS, "shutdown_seconds"]
    return tuple(f"{PREFIX}{name}_total" for name in counters) + tuple(f"{PREFIX}{name}" for name in others)


class SupervisorCollector(Collector):
    """Reads at the moment of the scrape. Must run on the loop's thread, where all that it reads is written."""

    def __init__(self, sink: MetricsSink, *, snapshot: SnapshotSource, counts: CountsSource) -> None:
        """`snapshot` gives None before the core exists; `counts` gives the last samples that are still fresh."""
        self._sink = sink
        self._snapshot = snapshot
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Yield every family of docs/metrics.md."""
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()

    def _counters(self) -> Iterator[Metric]:
        queues = self._sink.queues
        for name, text in QUEUE_COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=("queue",))
            for queue, counters in queues.items():
                family.add_metric((queue,), getattr(counters, name))
            yield family
        for name, (label, text) in LABELLED_COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=("queue", label))
            for queue, counters in queues.items():
                for key, value in getattr(counters, name).items():
                    family.add_metric((queue, key), value)
            yield family
        for name, text in GLOBAL_COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(self._sink, name))

    def _gauges(self) -> Iterator[Metric]:
        families = {name: _gauge(name, text) for name, text in QUEUE_GAUGES.items()}
        children = GaugeMetricFamily(PREFIX + "children", CHILDREN_HELP, labels=("queue", "state"))
        snapshot = self._snapshot()
        if snapshot is not None:
            for queue in snapshot.queues:
                _add_queue(families, children, queue, snapshot.now)
        for name, counts in self._counts().items():
            families["queue_visible"].add_metric((name,), counts.visible)
            families["queue_oldest_visible_seconds"].add_metric((name,), counts.oldest_visible_s or 0.0)
        yield from families.values()
        yield children

    def _histograms(self) -> Iterator[Metric]:
        for name, text in QUEUE_HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=("queue",))
            for queue, counters in self._sink.queues.items():
                observed: Distribution = getattr(counters, name)
                family.add_metric((queue,), _buckets(observed), observed.total)
            yield family
        shutdown = self._sink.shutdown_seconds
        family = HistogramMetricFamily(PREFIX + "shutdown_seconds", SHUTDOWN_HELP)
        family.add_metric((), _buckets(shutdown), shutdown.total)
        yield family


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=("queue",))


def _add_queue(
    families: Mapping[str, GaugeMetricFamily], children: GaugeMetricFamily, queue: QueueSnapshot, now: float
) -> None:
    """Add what the snapshot says about one queue."""
    label = (queue.queue,)
    families["in_flight"].add_metric(label, queue.in_flight)
    families["pending"].add_metric(label, queue.waiting)
    if queue.claims_attempted_at is not None:
        families["seconds_since_claim_attempt"].add_metric(label, max(0.0, now - queue.claims_attempted_at))
    running = [now - child.running_since for child in queue.children if child.running_since is not None]
    families["handler_running_seconds_max"].add_metric(label, max(running, default=0.0))
    states = dict.fromkeys((state.value for state in ChildState), 0)
    for child in queue.children:
        states[child.state] = states.get(child.state, 0) + 1
    for state, count in states.items():
        children.add_metric((queue.queue, state), count)


def _buckets(observed: Distribution) -> list[tuple[str, float]]:
    """Accumulate counts into the buckets of the wire format."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip(observed.bounds, observed.counts, strict=False):
        below += count
        buckets.append((str(bound), below))
    buckets.append(("+Inf", below + observed.counts[-1]))
    return buckets

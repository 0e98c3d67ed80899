"""Status: the document of `/api/status` and `status --json`, and the one line that USR1 logs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from supervisor.core.snapshot import ChildSnapshot, QueueSnapshot, Snapshot
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.deaths import Death
from supervisor.telemetry.health import unready
from supervisor.telemetry.metrics import MetricsSink, QueueCounters

Document = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this supervisor is."""

    host: str
    supervisor: str
    version: str


def status_document(
    snapshot: Snapshot | None,
    *,
    identity: Identity,
    metrics: MetricsSink,
    counts: Mapping[str, QueueCounts],
    deaths: Sequence[Death],
    not_live: Sequence[str],
    at: float,
) -> Document:
    """Build the document: plain values only. `at`: seconds since the epoch."""
    why_unready = unready(snapshot)
    document: Document = {
        **asdict(identity),
        "pid": os.getpid(),
        "time": round(at, 3),
        "state": "starting" if snapshot is None else snapshot.state,
        "uptime_s": 0.0 if snapshot is None else round(snapshot.now - snapshot.started_at, 3),
        "reloading": snapshot is not None and snapshot.reloading,
        "live": not not_live,
        "ready": not why_unready,
        "reasons": [*not_live, *(f"{queue}: {why}" if queue else why for queue, why in why_unready.items())],
        "queues": {},
        "recent_deaths": [asdict(death) for death in deaths],
        "events_dropped": metrics.events_dropped,
    }
    if snapshot is not None:
        document["queues"] = {
            queue.queue: _queue(queue, snapshot.now, counts.get(queue.queue), metrics.of(queue.queue))
            for queue in snapshot.queues
        }
    return document


def _queue(queue: QueueSnapshot, now: float, counts: QueueCounts | None, counters: QueueCounters) -> Document:
    return {
        "name": queue.queue,
        "mode": queue.mode,
        "handler": queue.handler,
        "concurrency": queue.concurrency,
        "paused": queue.paused,
        "parked": queue.parked,
        "not_ready_because": queue.not_ready_because,
        "in_flight": queue.in_flight,
        "pending": queue.waiting,
        "settling": queue.settling,
        "owed": queue.owed,
        "held_bytes": queue.held_bytes,
        "claim_age_s": _age(now, queue.claims_attempted_at),
        "database_error": queue.database_error,
        "listener_up": queue.listener_up,
        "lease_margin_s": _rounded(queue.lease_margin_s),
        "overdue_renewals": queue.overdue_renewals,
        "handler_ewma_s": _rounded(queue.handler_ewma_s, 6),
        "visible": None if counts is None else counts.visible,
        "visible_at_limit": counts is not None and counts.at_limit,
        "oldest_visible_s": None if counts is None else _rounded(counts.oldest_visible_s),
        "counters": {
            "claimed": counters.messages_claimed,
            "succeeded": counters.messages_succeeded,
            "retried": sum(counters.messages_retried.values()),
            "dead_lettered": sum(counters.messages_dead_lettered.values()),
            "abandoned": counters.messages_abandoned,
            "released": counters.messages_released,
            "deaths": sum(counters.child_deaths.values()),
            "leases_lost": counters.leases_lost,
        },
        "children": [_child(child, now) for child in queue.children],
    }


def _child(child: ChildSnapshot, now: float) -> Document:
    return {
        "child": child.child,
        "slot": child.slot,
        "incarnation": child.incarnation,
        "role": child.role,
        "state": child.state,
        "pid": child.pid,
        "age_s": _age(now, child.since),
        "messages": child.messages,
        "msg_id": child.msg_id,
        "attempt": child.attempt,
        "running_s": _age(now, child.running_since),
        "stop_reason": child.stop_reason,
        "progress": child.progress,
        "memory_bytes": child.tree_bytes,
    }


def _age(now: float, since: float | None) -> float | None:
    return None if since is None else round(max(0.0, now - since), 3)


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def status_line(snapshot: Snapshot | None, metrics: MetricsSink) -> str:
    """Say in one line how things stand."""
    if snapshot is None:
        return "starting"
    parts = [f"{snapshot.state}, up {snapshot.now - snapshot.started_at:.0f} s"]
    for queue in snapshot.queues:
        counters = metrics.of(queue.queue)
        running = sum(1 for child in queue.children if child.msg_id is not None)
        flags = "".join(f" {word}" for word, on in (("PAUSED", queue.paused), ("PARKED", bool(queue.parked))) if on)
        parts.append(
            f"{queue.queue}:{flags} children {queue.ready_children}/{queue.concurrency}, running {running}, "
            f"in flight {queue.in_flight}, waiting {queue.waiting}, ok {counters.messages_succeeded}, "
            f"retried {sum(counters.messages_retried.values())}, "
            f"dead-lettered {sum(counters.messages_dead_lettered.values())}, "
            f"deaths {sum(counters.child_deaths.values())}"
        )
    return "; ".join(parts)

"""The catalogue of log events: of each happening the name, level and sentence. docs/operations.md explains them.

A name is `<thing>.<participle>` and, like a metric's, never changes its meaning.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple, get_args

from supervisor.core import happenings as h
from supervisor.core.types import DeathCause
from supervisor.telemetry import facts as f


class Level(IntEnum):
    """Severity, the more the worse."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class Entry(NamedTuple):
    """How one kind of happening is logged."""

    event: str
    level: Level  # the lowest level that this event can have
    text: str


CATALOGUE: Final[dict[type, Entry]] = {
    h.MessagesClaimed: Entry("messages.claimed", Level.DEBUG, "messages claimed"),
    h.MessageStartedRunning: Entry("message.started", Level.DEBUG, "handler started"),
    h.MessageSucceeded: Entry("message.succeeded", Level.DEBUG, "message acknowledged"),
    h.MessageRetried: Entry("message.retried", Level.INFO, "message will be tried again"),
    h.MessageDeadLettered: Entry("message.dead_lettered", Level.WARNING, "message moved to the dead-letter queue"),
    h.MessageAbandoned: Entry("message.abandoned", Level.INFO, "handler left the message unsettled"),
    h.MessageReleased: Entry("message.released", Level.DEBUG, "message given back, uncharged"),
    h.SettlementFailed: Entry("settlement.failed", Level.WARNING, "settlement failed, it is tried again"),
    h.SettlementLapsed: Entry("settlement.lapsed", Level.WARNING, "settlement given up: settled unheard, or returns"),
    h.LeasesRenewed: Entry("leases.renewed", Level.DEBUG, "leases renewed"),
    h.LeaseRenewalFailed: Entry("leases.renewal_failed", Level.WARNING, "renewal failed, it is tried again"),
    h.LeaseLost: Entry("lease.lost", Level.WARNING, "lease lost: nothing is acknowledged any more"),
    h.ClaimingFailed: Entry("claiming.failed", Level.ERROR, "cannot claim messages"),
    h.ClaimingRecovered: Entry("claiming.recovered", Level.INFO, "messages can be claimed again"),
    h.WokenUp: Entry("queue.woken", Level.DEBUG, "woken up"),
    h.ChildStarting: Entry("child.starting", Level.DEBUG, "child is being started"),
    h.ChildBecameReady: Entry("child.ready", Level.INFO, "child is ready"),
    h.ChildFailedToStart: Entry("child.failed_to_start", Level.ERROR, "child did not start"),
    h.ChildStopping: Entry("child.stopping", Level.INFO, "child is being stopped"),
    h.ChildEnded: Entry("child.ended", Level.DEBUG, "child ended"),
    h.ChildUnkillable: Entry("child.unkillable", Level.ERROR, "child survives SIGKILL: its slot is closed"),
    h.HandlerProgress: Entry("handler.progress", Level.INFO, "handler reports progress"),
    h.QueueParked: Entry("queue.parked", Level.ERROR, "queue parked: its children do not start"),
    h.QueueUnparked: Entry("queue.unparked", Level.INFO, "queue is tried again"),
    h.QueuePaused: Entry("queue.paused", Level.INFO, "queue paused"),
    h.QueueResumed: Entry("queue.resumed", Level.INFO, "queue resumed"),
    h.CommitInDoubt: Entry("commit.in_doubt", Level.WARNING, "outcome of a commit was not heard"),
    h.ChargeOwed: Entry("charge.owed", Level.INFO, "an attempt is charged when the message is seen again"),
    h.ReloadStarted: Entry("reload.started", Level.INFO, "handler code is being reloaded"),
    h.ReloadEnded: Entry("reload.ended", Level.INFO, "reload ended"),
    h.ShutdownStarted: Entry("shutdown.started", Level.INFO, "shutting down"),
    h.ShutdownEscalated: Entry("shutdown.escalated", Level.WARNING, "children are being killed"),
    h.ShutdownEnded: Entry("shutdown.ended", Level.INFO, "shutdown ended"),
    f.ProcessesSwept: Entry("processes.swept", Level.WARNING, "processes that outlived their message were killed"),
    f.DatabaseReconnected: Entry("database.reconnected", Level.INFO, "connected to the database again"),
    f.ListenerLost: Entry("listener.lost", Level.WARNING, "not listening: queues are polled"),
    f.ListenerReconnected: Entry("listener.reconnected", Level.INFO, "listening again"),
    f.NotifySetupFailed: Entry("notify.setup_failed", Level.WARNING, "no notifications: the queue is polled"),
    f.NotifyRepaired: Entry("notify.repaired", Level.WARNING, "notifications were broken and have been repaired"),
    f.PauseIsLocal: Entry("queue.pause_is_local", Level.WARNING, "pause is known to this supervisor only"),
    f.SinkFailed: Entry("telemetry.sink_failed", Level.WARNING, "an event sink failed, the work goes on"),
    f.MetricsFileSkipped: Entry("telemetry.metrics_file_skipped", Level.WARNING, "a child's metrics are unreadable"),
    f.Noted: Entry("note", Level.DEBUG, ""),
}

# Events that the log writes by itself, without a happening.
OTHER_EVENTS: Final = ("boot", "boot.queue", "child.output", "child.log", "status", "log.suppressed", "library")

HAPPENINGS: Final[tuple[type, ...]] = get_args(h.Happening)

# Kinds whose level depends on what happened exactly, as `level_of` decides it.
RANGING: Final[frozenset[type]] = frozenset(
    {h.ChildEnded, h.MessageRetried, h.ReloadEnded, h.ShutdownEnded, h.CommitInDoubt, f.Noted}
)

_RANKS: Final = {"debug": Level.DEBUG, "info": Level.INFO, "warning": Level.WARNING, "error": Level.ERROR}


def parse_level(text: str) -> Level:
    """Turn a level's name into a level; what is unknown counts as info, and "critical" as error."""
    if text.lower() == "critical":
        return Level.ERROR
    return _RANKS.get(text.lower(), Level.INFO)


def level_of(happening: f.AnyHappening) -> Level:
    """Say how important this one happening is: some kinds range from routine to alarming."""
    match happening:
        case h.ChildEnded(cause=cause):
            return Level.DEBUG if cause in {DeathCause.RETIRED, DeathCause.SHUTDOWN} else Level.WARNING
        case h.MessageRetried(reason=reason):
            return Level.INFO if reason in {"requested", "deadlock"} else Level.WARNING
        case h.ReloadEnded(failed=str()):
            return Level.ERROR
        case h.ShutdownEnded(timed_out=True):
            return Level.WARNING
        case h.CommitInDoubt(outcome=outcome):
            return Level.WARNING if outcome == "unknown" else Level.INFO
        case f.Noted(level=level):
            return parse_level(level)
        case _:
            return CATALOGUE[type(happening)].level

"""The boot banner: one entry for the supervisor and one for each queue, which say what limits are in force."""

from __future__ import annotations

from shared.durations import format_duration
from shared.sizes import format_size
from supervisor.core.settings import CoreSettings, QueueSettings
from supervisor.telemetry.records import Record


def supervisor_fields(settings: CoreSettings) -> Record:
    """Say what holds for the whole."""
    return {
        "version": settings.version,
        "host": settings.host,
        "supervisor": settings.supervisor,
        "queues": len(settings.queues),
        "grace": format_duration(settings.grace_s),
        "kill_after": format_duration(settings.kill_after_s),
        "held_bytes_limit": format_size(settings.max_held_bytes),
    }


def queue_fields(queue: QueueSettings) -> Record:
    """Say what holds for one queue."""
    retry = queue.retry
    return {
        "queue": queue.name,
        "handler": queue.handler,
        "mode": queue.mode.value,
        "concurrency": queue.concurrency,
        "standby": queue.standby,
        "visibility_timeout": format_duration(queue.visibility_timeout_s),
        "soft_timeout": format_duration(queue.soft_timeout_s),
        "hard_timeout": format_duration(queue.hard_timeout_s),
        "memory_limit": format_size(queue.memory_limit_bytes),
        "max_tasks_per_child": queue.max_tasks_per_child or "none",
        "max_child_age": format_duration(queue.max_child_age_s),
        "claim_batch_size": queue.claim_batch_size,
        "max_in_flight": queue.max_in_flight or "auto",
        "polling_interval": format_duration(queue.polling_interval_s),
        "notify": queue.notify,
        "on_success": queue.on_success.value,
        "max_attempts": queue.max_attempts,
        "max_deaths": queue.max_deaths,
        "retry": f"{format_duration(retry.base_s)} x {retry.factor:g}, at most {format_duration(retry.max_s)}"
        + (", jitter" if retry.jitter else ""),
        "dead_letter_queue": queue.dead_letter_queue,
    }

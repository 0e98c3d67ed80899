"""What a queue's children are, and the HELLO frame that tells them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Final

from shared.wire.frames import PROTOCOL
from supervisor.core.commands import StartChild
from supervisor.core.types import Mode

DUMP_SIGNAL: Final = int(signal.SIGUSR2)
OOM_SCORE_ADJ: Final = 537  # an unusual number: by it a process that has cleared its environment is known to be ours


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Configuration of the children of one queue. From `dsn` to `max_deaths` only in transactional mode."""

    handler: str  # "package.module:function"
    app_dir: str
    mode: Mode = Mode.REGULAR
    dead_letter_queue: str = ""
    output: str = "capture"  # | "inherit"
    memory_limit_bytes: int | None = None
    dsn: str | None = None
    statement_timeout_ms: int | None = None
    visibility_timeout_ms: int | None = None
    max_attempts: int | None = None
    max_deaths: int | None = None
    title: bool = True
    metrics_dir: str | None = None
    oom_score_adj: int = OOM_SCORE_ADJ
    sync: str | None = None


def hello(spec: ChildSpec, command: StartChild, *, metrics_index: int) -> dict[str, Any]:
    """HELLO's meta. The metrics identity is a reused small number, so that files do not grow with respawns."""
    meta: dict[str, Any] = {
        "protocol": PROTOCOL,
        "queue": command.queue,
        "slot": command.slot,
        "incarnation": command.incarnation,
        "child": command.child,
        "mode": spec.mode.value,
        "handler": spec.handler,
        "app_dir": spec.app_dir,
        "dump_signal": DUMP_SIGNAL,
        "title": spec.title,
        "dead_letter_queue": spec.dead_letter_queue,
        "output": spec.output,
        "metrics_dir": spec.metrics_dir,
        "metrics_identity": f"{command.queue}-{metrics_index}" if spec.metrics_dir else None,
        "oom_score_adj": spec.oom_score_adj,
        "sync": spec.sync,
        "statement_timeout_ms": spec.statement_timeout_ms,
        "visibility_timeout_ms": spec.visibility_timeout_ms,
        "max_attempts": spec.max_attempts,
        "max_deaths": spec.max_deaths,
        "application_name": f"pgmq-supervisor {command.queue} {command.slot}.{command.incarnation}",
    }
    if spec.mode is Mode.TRANSACTIONAL:
        meta["dsn"] = spec.dsn
    return meta

"""The dead letter's envelope, as JSON text. SQL adds message, headers and the times from the row."""

from __future__ import annotations

import json
from typing import Any

from shared.text import clean_text
from supervisor.core.settings import CoreSettings
from supervisor.core.types import DeadLetterReason, DeathCause, DeathFacts, ErrorInfo


def build_envelope(
    settings: CoreSettings,
    *,
    reason: DeadLetterReason,
    queue: str,
    msg_id: int,
    attempt: int,
    deliveries: int,
    deaths: int,
    error: ErrorInfo | None,
    death: tuple[DeathCause, DeathFacts] | None,
) -> str:
    """Texts are cleaned and cut, so that the move cannot fail on them."""
    document: dict[str, Any] = {
        "version": 1,
        "reason": str(reason),
        "source": {
            "queue": queue,
            "msg_id": msg_id,
            "attempt": attempt,
            "deliveries": deliveries,
            "deaths": deaths,
        },
        "error": None if error is None else _error(error),
        "death": None if death is None else _death(*death),
        "worker": {"host": settings.host, "supervisor": settings.supervisor, "version": settings.version},
    }
    return json.dumps(document, separators=(",", ":"))


def _error(error: ErrorInfo) -> dict[str, str]:
    return {
        "type": clean_text(error.type),
        "message": clean_text(error.message),
        "traceback": clean_text(error.traceback),
    }


def _death(cause: DeathCause, facts: DeathFacts) -> dict[str, Any]:
    return {
        "cause": str(cause),
        "signal": facts.signal,
        "exit_code": facts.exit_code,
        "max_rss_kb": facts.max_rss_kb,
        "cpu_s": round(facts.cpu_s, 3),
        "stack": clean_text(facts.stack),
        "output_tail": clean_text(facts.output_tail),
    }

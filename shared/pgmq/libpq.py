"""What every session of ours asks of libpq, whoever opens it: the supervisor, a child, the client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

__all__ = ["KEEPALIVE", "refuses_options", "with_settings"]

KEEPALIVE: Final[Mapping[str, str]] = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""A peer that is gone is found in about ten seconds, instead of the hours of a kernel's defaults."""


def with_settings(settings: Mapping[str, str | int], given: str | None) -> str:
    """Give the parameter `options`: settings of ours, then what the caller or the environment says, which wins."""
    ours = [f"-c {name}={value}" for name, value in settings.items()]
    theirs = given or os.environ.get("PGOPTIONS", "")
    return " ".join(filter(None, [*ours, theirs.strip()]))


def refuses_options(text: str) -> bool:
    """Tell whether a pooler refused to connect because of `options`, which most of them do."""
    return "startup parameter" in text

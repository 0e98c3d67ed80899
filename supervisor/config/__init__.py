"""Configuration: read from file, environment and flags, checked as a whole, frozen.

    flags ──┐
    environ ┼─▶ sources ─▶ one tree with origins ─▶ models (types) ─▶ rules (impossible) ─▶ Config
    file ───┘                                                         advice (unwise)

`load` gives a `Config` or raises `InvalidConfiguration` with every problem at once; `examine` never raises.
"""

from __future__ import annotations

from supervisor.config.config import Config
from supervisor.config.loading import Examined, examine, load
from supervisor.config.problems import InvalidConfiguration, Problem
from supervisor.config.sources import DEFAULT_FILE, Overrides

__all__ = [
    "DEFAULT_FILE",
    "Config",
    "Examined",
    "InvalidConfiguration",
    "Overrides",
    "Problem",
    "examine",
    "load",
]

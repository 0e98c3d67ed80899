"""For tests of applications: a message without a queue, and what a handler makes of it. See `crashtests.plugin`."""

from __future__ import annotations

from crashtests.testing.handlers import HandlerOutcome, run_handler
from crashtests.testing.messages import Message, Stopped
from crashtests.testing.supervisors import Supervisor

__all__ = ["HandlerOutcome", "Message", "Stopped", "Supervisor", "run_handler"]

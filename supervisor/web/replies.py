"""Answers: JSON, never cached, never echoing what was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping

from aiohttp import web

from supervisor.control.actions import ActionError, Refusal

_STATUS = {Refusal.UNKNOWN: 404, Refusal.INVALID: 400, Refusal.CONFLICT: 409, Refusal.FAILED: 503}


class Refused(Exception):
    """Carries the answer of a request that is not carried out."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def refuse(status: int, reason: str) -> Refused:
    """Build a refusal to raise."""
    return Refused(status, reason)


def refused_action(error: ActionError) -> Refused:
    """Translate the refusal of an action."""
    return Refused(_STATUS[error.refusal], error.reason)


def json_reply(value: Mapping[str, object], *, status: int = 200) -> web.Response:
    """Answer with a JSON object."""
    return web.Response(
        body=json.dumps(value, default=str).encode() + b"\n", status=status, content_type="application/json"
    )


def error_reply(status: int, reason: str) -> web.Response:
    """Answer with a reason."""
    reply = json_reply({"error": reason}, status=status)
    if status == 401:
        reply.headers["WWW-Authenticate"] = 'Bearer realm="pgmq-supervisor"'
    return reply

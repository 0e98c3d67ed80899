"""The requests of the control socket, one JSON object each, checked before anything is done.

    {"command": "status"}                                   → {"ok": true, "result": {...}}
    {"command": "pause", "queue": "orders"}                 → {"ok": false, "refusal": "unknown", "error": "..."}

Commands: status, metrics, pause, resume, cancel, redrive, drain.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from supervisor.control.actions import ActionError, Actions, Refusal

MAX_MSG_ID: Final = 2**63 - 1
MAX_IDS: Final = 10_000


async def answer(actions: Actions, line: bytes) -> bytes:
    """Carry out one request and write its answer, which ends in a newline. Never raises."""
    try:
        reply: dict[str, object] = {"ok": True, "result": dict(await _perform(actions, _parsed(line)))}
    except ActionError as error:
        reply = {"ok": False, "refusal": error.refusal.value, "error": error.reason}
    except Exception as error:  # noqa: BLE001 - the boundary of the control socket
        reply = {"ok": False, "refusal": Refusal.FAILED.value, "error": f"{type(error).__name__}: {error}"}
    return json.dumps(reply, separators=(",", ":"), default=str).encode() + b"\n"


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise ActionError(Refusal.INVALID, "the request is no JSON") from None
    if not isinstance(request, dict):
        raise ActionError(Refusal.INVALID, "the request is no JSON object")
    return request


async def _perform(actions: Actions, request: Mapping[str, Any]) -> Mapping[str, object]:
    command = _COMMANDS.get(str(request.get("command")))
    if command is None:
        raise ActionError(Refusal.INVALID, f"unknown command; known are {', '.join(_COMMANDS)}")
    return await command(actions, request)


async def _status(actions: Actions, _: Mapping[str, Any]) -> Mapping[str, object]:
    return actions.status()


async def _metrics(actions: Actions, request: Mapping[str, Any]) -> Mapping[str, object]:
    body, content_type = await actions.metrics(openmetrics=bool(request.get("openmetrics")))
    return {"content_type": content_type, "text": body.decode("utf-8", errors="replace")}


async def _pause(actions: Actions, request: Mapping[str, Any]) -> Mapping[str, object]:
    return await actions.pause(queue_of(request))


async def _resume(actions: Actions, request: Mapping[str, Any]) -> Mapping[str, object]:
    return await actions.resume(queue_of(request))


async def _cancel(actions: Actions, request: Mapping[str, Any]) -> Mapping[str, object]:
    return await actions.cancel(queue_of(request), msg_id_of(request.get("msg_id")))


async def _redrive(actions: Actions, request: Mapping[str, Any]) -> Mapping[str, object]:
    msg_ids, rate = redrive_of(request)
    return await actions.redrive(queue_of(request), msg_ids, rate)


async def _drain(actions: Actions, _: Mapping[str, Any]) -> Mapping[str, object]:
    return await actions.drain()


Command = Callable[[Actions, Mapping[str, Any]], Awaitable[Mapping[str, object]]]
_COMMANDS: Final[dict[str, Command]] = {
    "status": _status,
    "metrics": _metrics,
    "pause": _pause,
    "resume": _resume,
    "cancel": _cancel,
    "redrive": _redrive,
    "drain": _drain,
}


def queue_of(request: Mapping[str, Any]) -> str:
    """Return the queue of a request."""
    queue = request.get("queue")
    if not isinstance(queue, str) or not queue or len(queue) > 200:
        raise ActionError(Refusal.INVALID, "queue must be a name")
    return queue


def msg_id_of(value: object) -> int:
    """Return a message's id."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_MSG_ID:
        raise ActionError(Refusal.INVALID, f"a message id is a number from 1 to {MAX_MSG_ID}")
    return value


def redrive_of(request: Mapping[str, Any]) -> tuple[list[int] | None, float | None]:
    """Return the ids (None: all, which must be asked for) and the rate a second of a redrive."""
    ids = request.get("msg_ids")
    msg_ids: list[int] | None = None
    if ids is None:
        if request.get("all") is not True:
            raise ActionError(Refusal.INVALID, 'name "msg_ids", or say "all": true')
    elif not isinstance(ids, list) or not ids or len(ids) > MAX_IDS:
        raise ActionError(Refusal.INVALID, f"msg_ids must be a list of 1 to {MAX_IDS} message ids")
    else:
        msg_ids = [msg_id_of(one) for one in ids]
    rate = request.get("rate")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1e6):
        raise ActionError(Refusal.INVALID, "rate must be a number above 0, messages a second")
    return msg_ids, None if rate is None else float(rate)

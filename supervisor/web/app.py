"""The routes: probes, metrics, status; actions behind the token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from supervisor.control.actions import ActionError, Actions, Refusal, Result
from supervisor.control.requests import MAX_MSG_ID, redrive_of
from supervisor.web.auth import check_token
from supervisor.web.gate import Gate
from supervisor.web.replies import Refused, error_reply, json_reply, refuse, refused_action

MAX_BODY_BYTES: Final = 256 << 10
_BODY_S: Final = 5.0
_ACTION_S: Final = 60.0
_HEADERS: Final = {
    "Server": "pgmq-supervisor",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'",
}
_INDEX: Final = """pgmq-supervisor

  GET  /livez                                   the loop makes progress
  GET  /readyz                                  every queue has its children and a database
  GET  /metrics                                 Prometheus and OpenMetrics
  GET  /api/status                              queues, children, recent deaths
  POST /api/queues/NAME/pause
  POST /api/queues/NAME/resume
  POST /api/queues/NAME/messages/ID/cancel
  POST /api/queues/NAME/dlq/redrive             {"all": true} or {"msg_ids": [...]}, "rate": messages a second
  POST /api/drain

POST needs Authorization: Bearer <token>.
"""


class Routes:
    """Handlers of requests; each is one question to the actions."""

    def __init__(self, actions: Actions, *, token: str | None) -> None:
        self._actions = actions
        self._token = token

    def add_to(self, app: web.Application) -> None:
        """Register everything."""
        app.router.add_get("/", self._index)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/api/status", self._status)
        app.router.add_post("/api/queues/{queue}/pause", self._pause)
        app.router.add_post("/api/queues/{queue}/resume", self._resume)
        app.router.add_post("/api/queues/{queue}/messages/{msg_id}/cancel", self._cancel)
        app.router.add_post("/api/queues/{queue}/dlq/redrive", self._redrive)
        app.router.add_post("/api/drain", self._drain)

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=_INDEX)

    async def _livez(self, _: web.Request) -> web.Response:
        reasons = list(self._actions.not_live())
        return json_reply({"live": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        why = self._actions.not_ready()
        reasons = [f"{queue}: {reason}" if queue else reason for queue, reason in why.items()]
        return json_reply({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        wants_openmetrics = "application/openmetrics-text" in request.headers.get("Accept", "")
        body, content_type = await self._actions.metrics(openmetrics=wants_openmetrics)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, _: web.Request) -> web.Response:
        return json_reply(self._actions.status())

    async def _pause(self, request: web.Request) -> web.Response:
        return await self._act(request, lambda _: self._actions.pause(_queue(request)))

    async def _resume(self, request: web.Request) -> web.Response:
        return await self._act(request, lambda _: self._actions.resume(_queue(request)))

    async def _cancel(self, request: web.Request) -> web.Response:
        return await self._act(request, lambda _: self._actions.cancel(_queue(request), _msg_id(request)))

    async def _redrive(self, request: web.Request) -> web.Response:
        return await self._act(request, lambda body: self._actions.redrive(_queue(request), *redrive_of(body)))

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._act(request, lambda _: self._actions.drain())

    async def _act(
        self, request: web.Request, action: Callable[[Mapping[str, Any]], Awaitable[Result]]
    ) -> web.Response:
        """Check the token before anything is read, then the body, then act."""
        check_token(request, self._token)
        body = await _body(request)
        try:
            async with asyncio.timeout(_ACTION_S):
                return json_reply(await action(body))
        except ActionError as error:
            raise refused_action(error) from None
        except TimeoutError:
            raise refuse(504, f"not finished within {_ACTION_S:.0f} s; it may still happen") from None


def _queue(request: web.Request) -> str:
    return request.match_info["queue"]


def _msg_id(request: web.Request) -> int:
    text = request.match_info["msg_id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) <= MAX_MSG_ID):
        raise ActionError(Refusal.INVALID, "a message id is a positive number")
    return int(text)


async def _body(request: web.Request) -> Mapping[str, Any]:
    """Read a JSON object; no body is an empty one."""
    try:
        async with asyncio.timeout(_BODY_S):
            data = await request.read()
    except TimeoutError:
        raise refuse(408, "the body did not come in time") from None
    if not data.strip():
        return {}
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise refuse(400, "the body is no JSON") from None
    if not isinstance(body, dict):
        raise refuse(400, "the body is no JSON object")
    return body


def make_app(
    actions: Actions,
    *,
    token: str | None,
    gate: Callable[[], Gate | None],
    on_error: Callable[[BaseException], None],
) -> web.Application:
    """Build the application. `on_error` is told of what should not happen; the client learns only that it did."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        door = gate()
        connection = None if door is None else door.of(request.transport)
        if connection is not None:
            connection.mark(busy=True)
        try:
            return await handler(request)
        except Refused as refused:
            return error_reply(refused.status, refused.reason)
        except web.HTTPException as error:
            reply = error_reply(error.status, error.reason)
            if "Allow" in error.headers:
                reply.headers["Allow"] = error.headers["Allow"]
            return reply
        except Exception as error:  # noqa: BLE001 - the boundary of HTTP
            on_error(error)
            return error_reply(500, "internal error, see the log")
        finally:
            if connection is not None:
                connection.mark(busy=False)

    async def finish(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(finish)
    Routes(actions, token=token).add_to(app)
    return app

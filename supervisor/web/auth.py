"""The bearer token in front of everything that changes anything."""

from __future__ import annotations

import hmac

from aiohttp import web

from supervisor.web.replies import refuse


def check_token(request: web.Request, token: str | None) -> None:
    """Raise the answer for a request that may not act: 401 without a token, 403 with a wrong one or none configured.

    The comparison takes the same time wherever the difference is.
    """
    if token is None:
        raise refuse(403, "actions are off: no token is configured in [http]")
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        raise refuse(401, "this needs the header Authorization: Bearer <token>")
    if not hmac.compare_digest(_bytes(given.strip()), _bytes(token)):
        raise refuse(403, "wrong token")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")

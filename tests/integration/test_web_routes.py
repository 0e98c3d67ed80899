"""HTTP as its users see it: a real server on loopback, a real client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from shared.errors import ConfigurationError
from supervisor.control.actions import ActionError, Refusal
from supervisor.web.server import WebServer
from tests.support.actions import RecordingActions

TOKEN = "a-token"  # noqa: S105 - of this test
AUTH = {"Authorization": f"Bearer {TOKEN}"}
POSTS = [
    "/api/queues/orders/pause",
    "/api/queues/orders/resume",
    "/api/queues/orders/messages/7/cancel",
    "/api/queues/orders/dlq/redrive",
    "/api/drain",
]


@pytest.fixture
def actions() -> RecordingActions:
    """The seam."""
    return RecordingActions()


@pytest.fixture
def errors() -> list[BaseException]:
    """What the log is told."""
    return []


@pytest.fixture
async def http(actions: RecordingActions, errors: list[BaseException]) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server with a token."""
    server = WebServer(actions, host="127.0.0.1", port=0, token=TOKEN, on_error=errors.append)
    await server.start()
    async with aiohttp.ClientSession(server.url) as session:
        yield session
    await server.close()


@pytest.fixture
async def http_without_token(actions: RecordingActions) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server without one."""
    server = WebServer(actions, host="127.0.0.1", port=0, token=None, on_error=lambda _: None)
    await server.start()
    async with aiohttp.ClientSession(server.url) as session:
        yield session
    await server.close()


class TestProbes:
    async def test_livez_is_ok_while_the_loop_makes_progress(self, http: aiohttp.ClientSession) -> None:
        """A live supervisor answers 200."""
        async with http.get("/livez") as reply:
            assert reply.status == 200
            assert await reply.json() == {"live": True, "reasons": []}

    async def test_livez_says_why_not(self, http: aiohttp.ClientSession, actions: RecordingActions) -> None:
        """503 carries the reasons."""
        actions.reasons = ["orders: nothing was claimed"]
        async with http.get("/livez") as reply:
            assert reply.status == 503
            assert (await reply.json())["reasons"] == ["orders: nothing was claimed"]

    async def test_readyz_names_the_queue_that_is_not_ready(
        self, http: aiohttp.ClientSession, actions: RecordingActions
    ) -> None:
        """503 names queue and reason."""
        actions.unready = {"orders": "0 of 2 children are ready"}
        async with http.get("/readyz") as reply:
            assert reply.status == 503
            assert (await reply.json())["reasons"] == ["orders: 0 of 2 children are ready"]

    async def test_head_is_answered_as_get(self, http: aiohttp.ClientSession) -> None:
        """Load balancers probe with HEAD."""
        async with http.head("/livez") as reply:
            assert reply.status == 200


class TestReading:
    async def test_metrics_come_as_text(self, http: aiohttp.ClientSession) -> None:
        """The default is Prometheus text."""
        async with http.get("/metrics") as reply:
            assert (reply.status, await reply.read()) == (200, b"text\n")

    async def test_metrics_come_as_openmetrics_when_accepted(self, http: aiohttp.ClientSession) -> None:
        """Accept chooses the format."""
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        async with http.get("/metrics", headers={"Accept": accept}) as reply:
            assert await reply.read() == b"# EOF\n"
            assert reply.content_type == "application/openmetrics-text"

    async def test_status_is_json_with_queues(self, http: aiohttp.ClientSession) -> None:
        """The status document is served as it is."""
        async with http.get("/api/status") as reply:
            assert "queues" in await reply.json()

    async def test_index_lists_the_routes(self, http: aiohttp.ClientSession) -> None:
        """Somebody who opens the port in a browser learns what there is."""
        async with http.get("/") as reply:
            assert "/metrics" in await reply.text()

    async def test_answers_say_nothing_about_the_server_software(self, http: aiohttp.ClientSession) -> None:
        """Headers: no versions, no caching, no sniffing."""
        async with http.get("/nothing") as reply:
            assert reply.headers["Server"] == "pgmq-supervisor"
            assert reply.headers["Cache-Control"] == "no-store"
            assert reply.headers["X-Content-Type-Options"] == "nosniff"


class TestActions:
    async def test_actions_reach_the_supervisor(self, http: aiohttp.ClientSession, actions: RecordingActions) -> None:
        """Each route asks for what its path says."""
        for path, body in (
            ("/api/queues/orders/pause", None),
            ("/api/queues/orders/resume", None),
            ("/api/queues/orders/messages/7/cancel", None),
            ("/api/queues/orders/dlq/redrive", {"all": True, "rate": 5}),
            ("/api/queues/orders/dlq/redrive", {"msg_ids": [1, 2]}),
            ("/api/drain", {}),
        ):
            async with http.post(path, headers=AUTH, json=body) as reply:
                assert reply.status == 200, await reply.text()
        assert actions.asked == [
            ("pause", "orders"),
            ("resume", "orders"),
            ("cancel", "orders", 7),
            ("redrive", "orders", None, 5.0),
            ("redrive", "orders", [1, 2], None),
            ("drain",),
        ]

    @pytest.mark.parametrize("path", POSTS)
    async def test_without_a_token_nothing_happens(
        self, http: aiohttp.ClientSession, actions: RecordingActions, path: str
    ) -> None:
        """401 tells how to authenticate."""
        async with http.post(path) as reply:
            assert reply.status == 401
            assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        assert actions.asked == []

    @pytest.mark.parametrize(
        "header", ["Bearer wrong", "Bearer a-toke", "Bearer a-token2", "bearer A-TOKEN", "Bearer \u00e4"]
    )
    async def test_a_wrong_token_is_forbidden(
        self, http: aiohttp.ClientSession, actions: RecordingActions, header: str
    ) -> None:
        """403 for everything but the token itself."""
        for path in POSTS:
            async with http.post(path, headers={"Authorization": header}) as reply:
                assert reply.status == 403
        assert actions.asked == []

    @pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Basic YTpi", "a-token", ""])
    async def test_what_is_no_bearer_token_is_unauthenticated(self, http: aiohttp.ClientSession, header: str) -> None:
        """401 for other schemes."""
        async with http.post("/api/drain", headers={"Authorization": header}) as reply:
            assert reply.status == 401

    async def test_a_token_in_the_query_is_no_token(self, http: aiohttp.ClientSession) -> None:
        """Addresses end in logs; the token must not be taken from them."""
        async with http.post("/api/drain", params={"token": TOKEN}) as reply:
            assert reply.status == 401

    async def test_actions_are_off_without_a_configured_token(
        self, http_without_token: aiohttp.ClientSession, actions: RecordingActions
    ) -> None:
        """Whatever is sent as a token, the answer says what to configure."""
        for headers in ({}, AUTH, {"Authorization": "Bearer None"}):
            for path in POSTS:
                async with http_without_token.post(path, headers=headers) as reply:
                    assert reply.status == 403
                    assert "token" in (await reply.json())["error"]
        assert actions.asked == []

    async def test_reading_needs_no_token(self, http_without_token: aiohttp.ClientSession) -> None:
        """Probes and metrics work without configuration."""
        async with http_without_token.get("/metrics") as reply:
            assert reply.status == 200

    @pytest.mark.parametrize("path", POSTS)
    async def test_get_does_not_act(self, http: aiohttp.ClientSession, actions: RecordingActions, path: str) -> None:
        """A link, an image or a crawler cannot change anything."""
        async with http.get(path, headers=AUTH) as reply:
            assert reply.status == 405
            assert reply.headers["Allow"] == "POST"
        assert actions.asked == []

    async def test_an_unknown_queue_is_not_found(self, http: aiohttp.ClientSession) -> None:
        """404 with the reason of the supervisor."""
        async with http.post("/api/queues/unknown/pause", headers=AUTH) as reply:
            assert (reply.status, await reply.json()) == (404, {"error": "no such queue"})

    @pytest.mark.parametrize("msg_id", ["0", "-1", "x", "9223372036854775808", "1e3", "%C2%B2", "99999999999999999999"])
    async def test_an_impossible_id_is_refused(
        self, http: aiohttp.ClientSession, actions: RecordingActions, msg_id: str
    ) -> None:
        """400 before the supervisor is asked."""
        async with http.post(f"/api/queues/orders/messages/{msg_id}/cancel", headers=AUTH) as reply:
            assert reply.status == 400
        assert actions.asked == []

    @pytest.mark.parametrize(
        "body",
        [b"", b"{}", b"[1]", b"no", b'{"msg_ids": []}', b'{"msg_ids": ["1"]}', b'{"msg_ids": [true]}', b'{"all": 1}',
         b'{"all": true, "rate": 0}', b'{"all": true, "rate": "x"}', b"[" * 100_000, b"\xff\xfe"],
    )  # fmt: skip
    async def test_a_senseless_redrive_is_refused(
        self, http: aiohttp.ClientSession, actions: RecordingActions, body: bytes
    ) -> None:
        """Redriving everything must be asked for in words; anything odd is refused."""
        async with http.post("/api/queues/orders/dlq/redrive", headers=AUTH, data=body) as reply:
            assert reply.status == 400
        assert actions.asked == []

    async def test_a_failed_action_is_a_bad_answer_not_a_traceback(
        self, http: aiohttp.ClientSession, actions: RecordingActions, errors: list[BaseException]
    ) -> None:
        """A fault of ours is told to the log, the client learns that it happened."""
        actions.failure = RuntimeError("secret detail")
        async with http.post("/api/drain", headers=AUTH) as reply:
            assert reply.status == 500
            assert "secret" not in await reply.text()
        assert errors == [actions.failure]

    async def test_a_database_that_is_away_is_503(self, http: aiohttp.ClientSession, actions: RecordingActions) -> None:
        """What may work later is no fault of the client."""
        actions.failure = ActionError(Refusal.FAILED, "database away")
        async with http.post("/api/drain", headers=AUTH) as reply:
            assert reply.status == 503


async def test_a_port_in_use_is_refused_with_a_remedy(actions: RecordingActions) -> None:
    """The message names host and port."""
    first = WebServer(actions, host="127.0.0.1", port=0, token=None, on_error=lambda _: None)
    await first.start()
    second = WebServer(actions, host="127.0.0.1", port=first.port, token=None, on_error=lambda _: None)
    with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1 port {first.port}"):
        await second.start()
    await second.close()
    await first.close()

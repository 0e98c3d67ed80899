"""A hostile client on the HTTP port: it may get no answer, the others must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress

import aiohttp
import pytest

from supervisor.web.app import MAX_BODY_BYTES
from supervisor.web.server import WebServer
from tests.support.actions import RecordingActions, until

TOKEN = "a-token"  # noqa: S105 - of this test
QUIET_S = 0.5
MAX_CONNECTIONS = 8


@pytest.fixture
def actions() -> RecordingActions:
    """The seam."""
    return RecordingActions()


@pytest.fixture
async def server(actions: RecordingActions) -> AsyncIterator[WebServer]:
    """A server with short deadlines and few connections, so that limits are reached soon."""
    server = WebServer(
        actions, host="127.0.0.1", port=0, token=TOKEN, on_error=lambda _: None,
        max_connections=MAX_CONNECTIONS, quiet_s=QUIET_S,
    )  # fmt: skip
    await server.start()
    yield server
    await server.close()


async def raw(server: WebServer, data: bytes) -> bytes:
    """Send bytes on a connection and return what comes until it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), 10)
        return b""
    finally:
        writer.transport.abort()


async def is_answered(server: WebServer) -> bool:
    """Whether an honest client is served."""
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{server.url}livez") as reply:
        return reply.status == 200


async def longest_pause_while(work: Awaitable[object]) -> float:
    """Run something and return for how long the loop did not turn, in seconds."""
    longest = 0.0
    task = asyncio.ensure_future(work)
    before = time.perf_counter()
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest = max(longest, now - before)
        before = now
    await task
    return longest


async def test_an_oversized_body_is_refused(server: WebServer, actions: RecordingActions) -> None:
    """413 for a body over the limit, announced or chunked."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        url = f"{server.url}api/queues/orders/dlq/redrive"
        for data in (b"x" * (MAX_BODY_BYTES + 1), chunks()):
            with suppress(aiohttp.ClientError):
                async with session.post(url, data=data) as reply:
                    assert reply.status == 413
    assert actions.asked == []
    assert await is_answered(server)


async def chunks() -> AsyncIterator[bytes]:
    """A body without a length."""
    for _ in range(20):
        yield b"x" * 65_536


async def test_a_body_is_not_read_without_a_token(server: WebServer) -> None:
    """The token is checked on the head: the answer comes while the body is still owed."""
    head = b"POST /api/drain HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n"
    assert b"401" in await raw(server, head)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"b" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"\x00" * 10_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/drain HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/drain HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /api/drain HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(20_000)) + b"\r\n",
    ],
    ids=["long line", "long header", "tls", "zeros", "version", "negative length", "smuggling", "huge chunk", "many"],
)
async def test_what_is_no_request_is_refused(
    server: WebServer, actions: RecordingActions, request_bytes: bytes
) -> None:
    """Nonsense costs its sender the connection, nobody else anything."""
    answer = await raw(server, request_bytes)
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert actions.asked == []
    assert await is_answered(server)


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/..%2f..%2fetc/passwd", "/static/../../../etc/passwd", "//etc/passwd", "/%00",
     "/api/status/..", "/metrics%0d%0aSet-Cookie:x", "/api/queues/../drain", "/.git/config"],
)  # fmt: skip
async def test_there_is_nothing_to_traverse(server: WebServer, path: str) -> None:
    """No path leads to a file, and none is echoed."""
    answer = await raw(server, f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in {b"404", b"400", b"405"}
    assert b"root:" not in answer
    assert b"Set-Cookie" not in answer


async def test_a_traversing_queue_name_reaches_nobody(server: WebServer, actions: RecordingActions) -> None:
    """An encoded slash stays inside the name, where the supervisor knows no such queue."""
    auth = f"Authorization: Bearer {TOKEN}\r\n"
    head = f"POST /api/queues/..%2f..%2fdrain/pause HTTP/1.1\r\nHost: a\r\n{auth}Connection: close\r\n\r\n"
    await raw(server, head.encode())
    assert ("drain",) not in actions.asked


async def test_slow_heads_are_cut(server: WebServer) -> None:
    """A head that comes byte by byte has one deadline for all of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    started = time.monotonic()

    async def drip() -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    assert time.monotonic() - started < 5
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    writer.transport.abort()


async def test_silent_connections_do_not_keep_others_out(server: WebServer) -> None:
    """More silent connections than there are places: an honest request is still answered."""
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(MAX_CONNECTIONS * 3)]
    assert await is_answered(server)
    for _, writer in connections:
        writer.transport.abort()


async def test_a_client_that_does_not_read_is_cut(server: WebServer, actions: RecordingActions) -> None:
    """An answer that nobody takes is thrown away with its connection."""
    actions.document = {"queues": {}, "filler": "x" * (8 << 20)}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(b"GET /api/status HTTP/1.1\r\nHost: a\r\n\r\n" * 4)
    gate = server._gate
    assert gate is not None
    await until(lambda: gate.connections)
    await until(lambda: not gate.connections)
    assert await is_answered(server)
    writer.transport.abort()
    del reader


async def test_a_flood_of_pipelined_requests_is_rationed(server: WebServer) -> None:
    """Thousands of requests in one packet: the loop keeps turning, the client waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def flood() -> None:
        with suppress(ConnectionError, TimeoutError):
            for _ in range(20):
                writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
                async with asyncio.timeout(0.05):
                    await writer.drain()

    assert await longest_pause_while(flood()) < 0.5
    assert await is_answered(server)
    writer.transport.abort()
    del reader


async def test_many_connections_at_once_are_all_served_in_turn(server: WebServer) -> None:
    """Five times as many honest clients as places: nobody is refused."""
    answers = await asyncio.gather(*(is_answered(server) for _ in range(MAX_CONNECTIONS * 5)))
    assert all(answers)


async def test_a_hanging_action_blocks_nobody(server: WebServer, actions: RecordingActions) -> None:
    """While an action waits for the database, probes are answered."""
    actions.hold = asyncio.Event()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        waiting = asyncio.create_task(session.post(f"{server.url}api/drain").__aenter__())
        await until(lambda: actions.asked)
        assert await is_answered(server)
        actions.hold.set()
        assert (await waiting).status == 200

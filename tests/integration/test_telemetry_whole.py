"""The telemetry as the composition root holds it, with HTTP in front of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import pytest

from supervisor.core import happenings as h
from supervisor.core.settings import CoreSettings, QueueSettings
from supervisor.core.snapshot import Snapshot
from supervisor.core.types import ChildId, QueueName
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.telemetry import Telemetry, TelemetryOptions
from supervisor.web.server import WebServer
from tests.support.actions import RecordingActions, until

ROOT = Path(__file__).resolve().parents[2]
ORDERS = QueueName("orders")
SETTINGS = CoreSettings(
    queues=(QueueSettings(name="orders", handler="tasks:handle", dead_letter_queue="orders_dlq"),),
    host="host", supervisor="one", version="1",
)  # fmt: skip
EMPTY = Snapshot(state="running", now=10.0, started_at=0.0, reloading=False, queues=())


class Asked(RecordingActions):
    """Reads go to the telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self._telemetry = telemetry

    def status(self) -> Mapping[str, object]:
        return self._telemetry.status()

    async def metrics(self, *, openmetrics: bool) -> tuple[bytes, str]:
        return await self._telemetry.metrics(openmetrics=openmetrics)

    def not_live(self) -> Sequence[str]:
        return self._telemetry.not_live()

    def not_ready(self) -> Mapping[str, str]:
        return self._telemetry.not_ready()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where lines go."""
    return tmp_path / "log"


@pytest.fixture
async def telemetry(tmp_path: Path, log: Path) -> AsyncIterator[Telemetry]:
    """One that runs, over a supervisor without queues at work."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    telemetry = Telemetry(SETTINGS, TelemetryOptions(log_fd=fd, metrics_base=tmp_path))

    async def sample() -> Mapping[str, QueueCounts]:
        return {"orders": QueueCounts(visible=4, oldest_visible_s=1.0)}

    telemetry.attach(snapshot=lambda: EMPTY, sample=sample)
    telemetry.start()
    yield telemetry
    await telemetry.close()
    os.close(fd)


@pytest.fixture
async def url(telemetry: Telemetry) -> AsyncIterator[str]:
    """HTTP in front of it."""
    server = WebServer(Asked(telemetry), host="127.0.0.1", port=0, token=None, on_error=lambda _: None)
    await server.start()
    yield server.url
    await server.close()


def entries(log: Path) -> list[dict[str, object]]:
    """What was logged."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def work(telemetry: Telemetry, messages: int) -> None:
    """Tell what the core tells of healthy messages."""
    for number in range(messages):
        telemetry.happened(h.MessageStartedRunning(ORDERS, number, 1, ChildId(1), 7, 0.004))
        telemetry.happened(h.MessageSucceeded(ORDERS, number, 1, 0.003, 0.002))


async def test_the_banner_states_the_limits_in_force(telemetry: Telemetry, log: Path) -> None:
    """One entry for the supervisor, one for each queue."""
    telemetry.flush()
    boot, queue = entries(log)
    assert (boot["event"], boot["grace"], boot["kill_after"]) == ("boot", "30s", "5s")
    assert queue["event"] == "boot.queue"
    limits = ("visibility_timeout", "hard_timeout", "soft_timeout", "memory_limit", "max_attempts", "max_deaths")
    assert [queue[name] for name in limits] == ["30s", "30m", "none", "none", 5, 3]


async def test_a_scrape_has_ours_and_the_handlers(telemetry: Telemetry, url: str) -> None:
    """Counters of the core, samples of the database, metrics of a real child, in one exposition."""
    work(telemetry, 10)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from child.metrics import keep_metrics_apart as keep;"
        "keep(sys.argv[2], 'orders-0'); from prometheus_client import Counter; Counter('mine', 'Mine.').inc(3)"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(telemetry.metrics_folder)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    accept = {"Accept": "application/openmetrics-text"}
    async with aiohttp.ClientSession(url) as session, session.get("/metrics", headers=accept) as reply:
        text = await reply.text()
    for line in (
        'pgmq_supervisor_messages_succeeded_total{queue="orders"} 10',
        'pgmq_supervisor_queue_visible{queue="orders"} 4',
        "mine_total 3",
    ):
        assert line in text
    assert text.endswith("# EOF\n")


async def test_a_hundred_scrapes_a_second_leave_the_loop_to_the_work(telemetry: Telemetry, url: str) -> None:
    """Every scrape on a new connection, from another process, for two seconds; the loop's pauses stay short.

    The share of the loop's time is what a scrape must not take; it is measured as the longest and the total delay of a
    callback that would run each millisecond.
    """
    code = """
import socket, sys, time
port = int(sys.argv[1])
start = time.monotonic()
for number in range(200):
    time.sleep(max(0, start + number / 100 - time.monotonic()))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n")
        data = b""
        while chunk := sock.recv(65536):
            data += chunk
    assert b" 200 " in data[:20] and b"shutdown_seconds" in data
"""
    port = url.rsplit(":", 1)[1].strip("/")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, port)
    waiting = asyncio.create_task(process.wait())
    before = time.process_time()
    longest = 0.0
    while not waiting.done():
        turn = time.perf_counter()
        work(telemetry, 20)
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - turn)
    assert waiting.result() == 0
    assert longest < 0.2
    assert time.process_time() - before < 1.5


async def test_a_library_that_complains_is_heard(telemetry: Telemetry, log: Path) -> None:
    """A task's exception that nobody took ends in our log, not on stderr."""
    asyncio.get_running_loop().call_exception_handler({"message": "nobody took it"})
    telemetry.flush()
    assert any(entry["event"] == "library" and entry["message"] == "nobody took it" for entry in entries(log))


async def test_telemetry_ticks_and_looks_at_health(telemetry: Telemetry) -> None:
    """A driver that does not turn is seen without anybody asking."""
    telemetry.attach(snapshot=lambda: EMPTY, heartbeat=lambda: 0.0)
    await until(lambda: telemetry._not_live)
    assert "driver" in telemetry.not_live()[0]


async def test_the_folder_of_childrens_metrics_goes_with_us(telemetry: Telemetry, tmp_path: Path) -> None:
    """It is private, and there for HELLO."""
    assert telemetry.metrics_folder is not None
    folder = Path(telemetry.metrics_folder)
    mode = await asyncio.to_thread(lambda: folder.stat().st_mode & 0o777)
    assert mode == 0o700

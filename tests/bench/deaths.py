"""What deaths cost: 10 ms handlers on 8 children, 2 % of the messages killing theirs, against the undisturbed run."""

from __future__ import annotations

import socket
import statistics
from typing import Any

from tests.bench import harness

CONFIG = """
[log]
level = "error"
[queues.bench]
handler = "tasks:{handler}"
concurrency = {concurrency}
standby = {standby}
max_deaths = 1
"""


def _run(server_dsn: str, messages: int, deadly_every: int, standby: int) -> float:
    with harness.queue(server_dsn, "bench", "bench_dlq") as (dsn, connection):
        harness.fill(connection, "bench", messages, deadly_every=deadly_every)
        config = CONFIG.format(handler="ten_ms", concurrency=8, standby=standby)
        with harness.service(dsn, config) as running:
            return harness.drain(connection, running, "bench").per_second


def _refill(server_dsn: str, rounds: int, standby: int) -> list[float]:
    """Milliseconds from the start of a message that kills its child to the start of the next one, one slot."""
    with (
        harness.queue(server_dsn, "bench", "bench_dlq") as (dsn, connection),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reports,
    ):
        reports.bind(("127.0.0.1", 0))
        reports.settimeout(60.0)
        port = str(reports.getsockname()[1])
        harness.fill(connection, "bench", 2 * rounds, deadly_every=2)
        config = CONFIG.format(handler="stamp", concurrency=1, standby=standby)
        with harness.service(dsn, config, BENCH_PORT=port):
            starts = [int(reports.recv(64).split()[1]) for _ in range(2 * rounds)]
    # Messages come in order: 1 lives, 2 kills, 3 lives, ...; from each killing start to the next start.
    return [(starts[n + 1] - starts[n]) / 1e6 for n in range(1, len(starts) - 1, 2)]


def run(server_dsn: str, *, messages: int, rounds: int) -> dict[str, Any]:
    """Undisturbed and disturbed, without and with one spare."""
    results: dict[str, Any] = {}
    for standby in (0, 1):
        calm = _run(server_dsn, messages, 0, standby)
        disturbed = _run(server_dsn, messages, 50, standby)
        refill = _refill(server_dsn, rounds, standby)
        results[f"standby {standby}"] = {
            "undisturbed_per_s": round(calm),
            "with_deaths_per_s": round(disturbed),
            "ratio": round(disturbed / calm, 2),
            "death_to_next_start_median_ms": round(statistics.median(refill), 1),
        }
    return results

"""No-op throughput in regular mode against a bare loop of `pgmq.read(100)` and `pgmq.delete(100)`."""

from __future__ import annotations

import time
from typing import Any

from tests.bench import harness

CONFIG = """
[log]
level = "warning"
[queues.bench]
handler = "tasks:noop"
concurrency = {concurrency}
"""


def bare_loop(server_dsn: str, messages: int) -> float:
    """Messages a second of one client that only reads and deletes."""
    with harness.queue(server_dsn, "bench") as (_, connection):
        harness.fill(connection, "bench", messages)
        began = time.monotonic()
        while True:
            rows = connection.execute("SELECT msg_id, message FROM pgmq.read('bench', 30, 100)").fetchall()
            if not rows:
                break
            connection.execute("SELECT pgmq.delete('bench', %s::bigint[])", ([row[0] for row in rows],))
        return messages / (time.monotonic() - began)


def supervised(server_dsn: str, messages: int, concurrency: int) -> harness.Drained:
    """The same through killable children."""
    with harness.queue(server_dsn, "bench", "bench_dlq") as (dsn, connection):
        harness.fill(connection, "bench", messages)
        with harness.service(dsn, CONFIG.format(concurrency=concurrency)) as running:
            return harness.drain(connection, running, "bench")


def run(server_dsn: str, *, messages: int) -> dict[str, Any]:
    """Bare before and after, so that drift of the machine shows."""
    bare = [bare_loop(server_dsn, messages)]
    results: dict[str, Any] = {}
    for concurrency in (2, 8):
        drained = supervised(server_dsn, messages, concurrency)
        results[f"concurrency {concurrency}"] = {
            "messages_per_s": round(drained.per_second),
            "parent_cpu_us_per_message": round(drained.parent_cpu_s / drained.messages * 1e6, 1),
        }
    bare.append(bare_loop(server_dsn, messages))
    mean = sum(bare) / 2
    for result in results.values():
        result["ratio_to_bare"] = round(result["messages_per_s"] / mean, 2)
    return {"bare_loop": {"messages_per_s": round(mean), "runs": [round(rate) for rate in bare]}, **results}

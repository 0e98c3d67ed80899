"""Transactions a second against a bare begin-read-delete-commit loop with the same number of connections."""

from __future__ import annotations

import multiprocessing
from typing import Any

import psycopg

from tests.bench import harness

CONFIG = """
[log]
level = "warning"
[queues.bench]
handler = "tasks:noop_tx"
mode = "transactional"
concurrency = {concurrency}
"""


def _bare_worker(dsn: str) -> None:
    """Each in a process of its own, like our children."""
    with psycopg.connect(dsn) as connection:
        while True:
            row = connection.execute("SELECT msg_id, message FROM pgmq.read('bench', 30, 1)").fetchone()
            if row is None:
                connection.rollback()
                return
            connection.execute("SELECT pgmq.delete('bench', %s::bigint)", (row[0],))
            connection.commit()


def _bare(server_dsn: str, messages: int, workers: int) -> float:
    with harness.queue(server_dsn, "bench") as (dsn, connection):
        harness.fill(connection, "bench", messages)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_bare_worker, args=(dsn,)) for _ in range(workers)]
        for process in processes:
            process.start()
        before, seconds = harness.await_empty(connection, "bench")
        for process in processes:
            process.join()
        return before / seconds


def run(server_dsn: str, *, messages: int) -> dict[str, Any]:
    """With four connections and with eight."""
    return {f"{connections} connections": _compare(server_dsn, messages, connections) for connections in (4, 8)}


def _compare(server_dsn: str, messages: int, concurrency: int) -> dict[str, Any]:
    """Bare before and after: the machine may have had other things to do."""
    bare = [_bare(server_dsn, messages, concurrency)]
    with harness.queue(server_dsn, "bench", "bench_dlq") as (dsn, connection):
        harness.fill(connection, "bench", messages)
        with harness.service(dsn, CONFIG.format(concurrency=concurrency)) as running:
            drained = harness.drain(connection, running, "bench")
    bare.append(_bare(server_dsn, messages, concurrency))
    mean = sum(bare) / 2
    return {
        "bare_per_s": round(mean),
        "transactions_per_s": round(drained.per_second),
        "ratio_to_bare": round(drained.per_second / mean, 2),
        "parent_cpu_us_per_message": round(drained.parent_cpu_s / drained.messages * 1e6, 1),
    }

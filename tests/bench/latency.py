"""Idle latency: from the commit of a send to the start of the handler, against a bare LISTEN-and-read loop."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from tests.bench import harness

CONFIG = """
[log]
level = "warning"
[queues.bench]
handler = "tasks:report"
polling_interval = "60s"
"""
_PAUSE_S = 0.3  # longer than PGMQ's notification throttle: each message meets an idle worker


def _measure(connection: psycopg.Connection[Any], receive: Callable[[], int], rounds: int) -> list[float]:
    """Milliseconds from the commit to the start, one message at a time."""
    latencies = []
    for _ in range(rounds):
        time.sleep(_PAUSE_S)
        connection.execute("SELECT pgmq.send('bench', '1')")
        committed = time.monotonic_ns()
        latencies.append((receive() - committed) / 1e6)
    return latencies


def _bare(dsn: str, connection: psycopg.Connection[Any], rounds: int) -> list[float]:
    """One connection that listens, reads, and deletes."""
    starts: list[int] = []
    arrived = threading.Semaphore(0)
    ready = threading.Event()

    def loop() -> None:
        with psycopg.connect(dsn, autocommit=True) as listener:
            listener.execute('LISTEN "pgmq.q_bench.INSERT"')
            ready.set()
            while len(starts) < rounds:
                for _ in listener.notifies(timeout=5.0, stop_after=1):
                    pass
                for row in listener.execute("SELECT msg_id FROM pgmq.read('bench', 30, 1)").fetchall():
                    starts.append(time.monotonic_ns())
                    arrived.release()
                    listener.execute("SELECT pgmq.delete('bench', %s::bigint)", (row[0],))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    ready.wait()

    def receive() -> int:
        arrived.acquire()
        return starts[-1]

    latencies = _measure(connection, receive, rounds)
    thread.join()
    return latencies


def run(server_dsn: str, *, rounds: int) -> dict[str, Any]:
    """Both on the same server, in the same run."""
    with harness.queue(server_dsn, "bench", "bench_dlq") as (dsn, connection):
        connection.execute("SELECT pgmq.enable_notify_insert('bench')")
        bare = _bare(dsn, connection, rounds)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reports:
            reports.bind(("127.0.0.1", 0))
            reports.settimeout(30.0)
            port = str(reports.getsockname()[1])

            def receive() -> int:
                return int(reports.recv(64))

            with harness.service(dsn, CONFIG, BENCH_PORT=port):
                connection.execute("SELECT pgmq.send('bench', '1')")
                receive()  # the first waits for the child to boot
                supervised = _measure(connection, receive, rounds)
    bare_ms, ours_ms = statistics.median(bare), statistics.median(supervised)
    return {
        "bare_median_ms": round(bare_ms, 2),
        "median_ms": round(ours_ms, 2),
        "p95_ms": round(sorted(supervised)[int(len(supervised) * 0.95)], 2),
        "ratio_to_bare": round(ours_ms / bare_ms, 2),
    }

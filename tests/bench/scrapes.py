"""Throughput while `/metrics` is scraped a hundred times a second, and while it is not; handlers sleep 2 ms."""

from __future__ import annotations

import http.client
import multiprocessing
import time
from multiprocessing.synchronize import Event
from typing import Any

from tests.bench import harness
from tests.support.watch import HTTP, Watch

CONFIG = (
    HTTP
    + """
[log]
level = "info"
[queues.bench]
handler = "tasks:two_ms"
concurrency = 8
"""
)
_RATE_PER_S = 100


def _scrape(port: int, stop: Event, counter: Any) -> None:
    """Ask over one connection, as a collector does, at a steady rate."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    due = time.monotonic()
    while not stop.is_set():
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == http.client.OK
        answer.read()
        counter.value += 1
        due += 1 / _RATE_PER_S
        time.sleep(max(0.0, due - time.monotonic()))


def _drain(server_dsn: str, messages: int, *, scraped: bool) -> tuple[float, float]:
    """Messages and scrapes a second."""
    with harness.queue(server_dsn, "bench", "bench_dlq") as (dsn, connection):
        harness.fill(connection, "bench", messages)
        with harness.service(dsn, CONFIG) as running:
            port = Watch(running).port
            context = multiprocessing.get_context("spawn")
            stop, counter = context.Event(), context.Value("q", 0)
            scraper = context.Process(target=_scrape, args=(port, stop, counter), daemon=True)
            if scraped:
                scraper.start()
            began = time.monotonic()
            drained = harness.drain(connection, running, "bench")
            scrapes = counter.value / (time.monotonic() - began)
            stop.set()
            if scraped:
                scraper.join()
            return drained.per_second, scrapes


def run(server_dsn: str, *, messages: int) -> dict[str, Any]:
    """In turns, as the machine may have other things to do at times."""
    without: list[float] = []
    scraped: list[float] = []
    rates: list[float] = []
    for _ in range(3):
        without.append(_drain(server_dsn, messages, scraped=False)[0])
        rate, scrapes = _drain(server_dsn, messages, scraped=True)
        scraped.append(rate)
        rates.append(scrapes)
    return {
        "without: messages_per_s": [round(rate) for rate in without],
        "scraped: messages_per_s": [round(rate) for rate in scraped],
        "scrapes_per_s": round(sum(rates) / len(rates)),
        "ratio": round(sum(scraped) / sum(without), 3),
    }

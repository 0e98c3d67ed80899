"""Metrics over many restarts of children: no more files, counters that never fall, a scrape as quick as ever.

`make soak` restarts 5 000 times, else it is 100 times.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support.running import Stage, stage
from tests.support.soak import SOAK
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

RESTARTS: Final = 5_000 if SOAK else 100
FIRST: Final = 20
SCRAPE_S: Final = 0.1
CHILDREN: Final = 2

CONFIG: Final = (
    HTTP
    + f"""
[queues.jobs]
handler = "tasks:handle"
concurrency = {CHILDREN}
max_tasks_per_child = 1
on_success = "archive"
"""
)

HANDLER: Final = """
    from prometheus_client import Counter, Gauge, Histogram

    HANDLED = Counter("app_handled", "Messages.", ["kind"])
    SIZE = Histogram("app_size", "Sizes.", buckets=(1, 10, 100))
    ALIVE = Gauge("app_alive", "Processes that work.", multiprocess_mode="livesum")

    def handle(message):
        HANDLED.labels("even" if message.id % 2 == 0 else "odd").inc()
        SIZE.observe(message.id % 100)
        ALIVE.set(1)
"""


def files(runtime: Path) -> set[str]:
    """The files of children's metrics that go on from one process to the next."""
    found = {file.name for file in runtime.glob("pgmq-supervisor-metrics-*/*.db")}
    return {name for name in found if not name.startswith("gauge_live")}


def counters(text: str) -> dict[str, float]:
    """Every series of the exposition that may only grow."""
    growing = re.findall(r"^# TYPE (\S+) (?:counter|histogram)$", text, re.MULTILINE)
    series = re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in series if name.startswith(tuple(growing)) and "_created" not in name}


class Scraper:
    """Scrapes one after the other; each must be nowhere below the one before."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: dict[str, float] = {}

    def look(self) -> dict[str, float]:
        """One scrape."""
        status, text = self._watch.get("/metrics")
        assert status == 200
        found = counters(text)
        for name, value in self._seen.items():
            assert found.get(name, -1.0) >= value, f"{name} fell from {value} to {found.get(name)}"
        self._seen = found
        return found

    def slowest_s(self) -> float:
        """The slowest of some scrapes: among them one that is not the answer to an earlier one."""
        times = []
        for _ in range(6):
            pass_time(1)  # an answer is never older than five seconds
            began = time.perf_counter()
            self.look()
            times.append(time.perf_counter() - began)
        return max(times)


def _work_off(on: Stage, scraper: Scraper, total: int) -> None:
    """Wait until so many are done in all, and scrape meanwhile."""

    def done() -> bool:
        scraper.look()
        return on.left() == 0

    eventually(done, timeout_s=60 + total, what="all messages")
    eventually(
        lambda: (
            scraper.look()['app_handled_total{kind="even"}'] + scraper.look()['app_handled_total{kind="odd"}'] == total
        ),
        timeout_s=30,
        what=f"{total} in the handlers' own counter",
    )


@pytest.mark.soak
@pytest.mark.timeout(RESTARTS + 240)
def test_restarts_leave_no_trace_in_the_metrics(tmp_path: Path, database: str) -> None:
    """Each message is a new process: the same files and series as at the beginning, exact sums, and a quick scrape."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    with stage(tmp_path, database, CONFIG, HANDLER) as on:
        on.create()
        on.send(*range(FIRST))
        on.service.start(env={"XDG_RUNTIME_DIR": str(runtime)})
        scraper = Scraper(Watch(on.service))
        _work_off(on, scraper, FIRST)
        before_s, series = scraper.slowest_s(), set(scraper.look())
        for kind in ("counter", "histogram"):
            assert any(name.startswith(kind) for name in files(runtime))
        on.send(*range(RESTARTS))
        _work_off(on, scraper, FIRST + RESTARTS)
        after_s, found = scraper.slowest_s(), scraper.look()
        assert set(found) == series
        assert found["app_size_count"] == FIRST + RESTARTS
        assert found['pgmq_supervisor_child_starts_total{queue="jobs"}'] >= FIRST + RESTARTS
        assert found['pgmq_supervisor_messages_succeeded_total{queue="jobs"}'] == FIRST + RESTARTS
        # One identity a living process: the children, a successor for one of them, and one that has just ended.
        assert len(files(runtime)) <= 2 * (CHILDREN + 2), sorted(files(runtime))
        assert after_s < SCRAPE_S
        assert after_s < before_s + SCRAPE_S / 2
        assert on.service.stop() == 0
        assert list(runtime.iterdir()) == []

"""Children's metrics: real processes that count with prometheus_client, and the sum that the parent serves."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from supervisor.telemetry.child_metrics import ChildMetrics, split_name

ROOT = Path(__file__).resolve().parents[2]

# A child: told where to count, it imports a "handler" that defines metrics, then does what the test says.
CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
from child.metrics import keep_metrics_apart
keep_metrics_apart(sys.argv[2], sys.argv[3])
assert "prometheus_client" not in sys.modules
assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
import prometheus_client as p
jobs = p.Counter("jobs", "Jobs done.", ["kind"])
size = p.Gauge("size", "Size.")
seconds = p.Histogram("seconds", "Duration.", buckets=[1, 2])
latency = p.Summary("latency", "Latency.")
exec(sys.argv[4])
"""


@pytest.fixture
def skipped() -> list[tuple[str, str]]:
    """Files that could not be read."""
    return []


@pytest.fixture
def metrics(tmp_path: Path, skipped: list[tuple[str, str]]) -> Iterator[ChildMetrics]:
    """The folder of one run."""
    metrics = ChildMetrics(tmp_path, on_skipped=lambda file, why: skipped.append((file, why)))
    yield metrics
    metrics.close()


def run_child(metrics: ChildMetrics, identity: str, work: str) -> int:
    """Run a child to its end; returns its pid."""
    command = [sys.executable, "-c", CHILD, str(ROOT), str(metrics.folder), identity, work]
    with subprocess.Popen(command) as child:
        assert child.wait(60) == 0
    return child.pid


def value(metrics: ChildMetrics, name: str, **labels: str) -> float | None:
    """One sample of the sum."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry.get_sample_value(name, labels)


def write(metrics: ChildMetrics, file: str, *counts: tuple[str, float]) -> Path:
    """Write a file as a child does."""
    path = metrics.folder / file
    mapped = MmapedDict(str(path))  # type: ignore[no-untyped-call]
    for name, count in counts:
        mapped.write_value(mmap_key(name, f"{name}_total", [], [], "Help."), count, 0.0)  # type: ignore[no-untyped-call, arg-type]
    mapped.close()  # type: ignore[no-untyped-call]
    return path


class TestChildren:
    def test_handlers_metrics_are_summed_over_children(self, metrics: ChildMetrics) -> None:
        """Counters, histograms and summaries of two processes are one series."""
        work = "jobs.labels('a').inc(2); seconds.observe(1.5); latency.observe(3); size.set(4)"
        for identity in ("orders-0", "orders-1"):
            run_child(metrics, identity, work)
        assert value(metrics, "jobs_total", kind="a") == 4
        assert value(metrics, "seconds_count") == 2
        assert value(metrics, "seconds_sum") == 3.0
        assert value(metrics, "seconds_bucket", le="1.0") == 0
        assert value(metrics, "seconds_bucket", le="2.0") == 2
        assert value(metrics, "latency_sum") == 6
        assert value(metrics, "size") == 8

    def test_a_successor_goes_on_where_a_dead_child_stopped(self, metrics: ChildMetrics) -> None:
        """Counters are monotone and files do not multiply."""
        run_child(metrics, "orders-0", "jobs.labels('a').inc(2); os._exit(0)")
        files = len(os.listdir(metrics.folder))
        run_child(metrics, "orders-0", "jobs.labels('a').inc(3); os._exit(0)")
        assert value(metrics, "jobs_total", kind="a") == 5
        assert len(os.listdir(metrics.folder)) <= files + 1  # a live gauge by pid, until the death is told

    def test_gauges_end_with_their_process(self, metrics: ChildMetrics) -> None:
        """What a dead child said about itself is not added to what the living say."""
        pid = run_child(metrics, "orders-0", "size.set(4)")
        assert value(metrics, "size") == 4
        metrics.forget(pid)
        assert value(metrics, "size") is None
        assert not [name for name in os.listdir(metrics.folder) if name.startswith("gauge")]

    def test_a_forked_copy_does_not_write(self, metrics: ChildMetrics) -> None:
        """The copy counts for itself; new metrics of it make no file."""
        run_child(
            metrics, "orders-0",
            "jobs.labels('a').inc(2)\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    jobs.labels('a').inc(100); jobs.labels('b').inc(); p.Gauge('other', 'x').set(1); os._exit(0)\n"
            "os.waitpid(pid, 0); jobs.labels('a').inc(1)",
        )  # fmt: skip
        assert value(metrics, "jobs_total", kind="a") == 3
        assert value(metrics, "jobs_total", kind="b") is None
        assert value(metrics, "other") is None

    def test_a_child_without_metrics_makes_no_file(self, metrics: ChildMetrics) -> None:
        """And never imports the library."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from child.metrics import keep_metrics_apart as k;"
            "k(sys.argv[2], 'a-0'); import json; assert 'prometheus_client' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code, str(ROOT), str(metrics.folder)], check=True)
        assert os.listdir(metrics.folder) == ["lock"]

    def test_without_a_folder_the_library_is_left_alone(self) -> None:
        """Metrics off: nothing is hooked."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from child.metrics import keep_metrics_apart as k;"
            "before = list(sys.meta_path); k(None, None); assert sys.meta_path == before"
        )
        subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True)

    def test_a_folder_that_is_gone_does_not_stop_the_handler(self, metrics: ChildMetrics) -> None:
        """Counting fails silently, the work goes on."""
        shutil.rmtree(metrics.folder)
        run_child(metrics, "orders-0", "jobs.labels('a').inc(2); assert jobs.labels('a')._value.get() == 2")

    def test_a_child_puts_an_unreadable_file_aside(self, metrics: ChildMetrics, skipped: list[tuple[str, str]]) -> None:
        """A forged length would make the library read for ever: the child starts all the same, and counts anew."""
        run_child(metrics, "orders-0", "jobs.labels('a').inc(2)")
        assert value(metrics, "jobs_total", kind="a") == 2
        (metrics.folder / "counter_orders-0.db").write_bytes(struct.pack("iiii", 64, 0, -24, 0) + b"x" * 48)
        run_child(metrics, "orders-0", "jobs.labels('a').inc(3)")
        assert value(metrics, "jobs_total", kind="a") == 5
        assert len(skipped) == 1


class TestCorruptFiles:
    @pytest.mark.parametrize(
        "content",
        [
            b"\x01", b"\xff\xff\xff\xff\0\0\0\0", struct.pack("ii", 1 << 30, 0),
            struct.pack("iii", 64, 0, 1000) + b"x" * 52,
            struct.pack("iii", 64, 0, -24) + b"x" * 52, struct.pack("iii", 40, 0, 8) + b"\xff" * 28,
            struct.pack("iii", 40, 0, 4) + b"nope" + b"\0" * 24, b"x" * 10_000,
        ],
        ids=["short", "negative", "beyond", "length", "loop", "no text", "no json", "noise"],
    )  # fmt: skip
    def test_they_are_skipped_and_counted(
        self, metrics: ChildMetrics, skipped: list[tuple[str, str]], content: bytes
    ) -> None:
        """The others are served."""
        write(metrics, "counter_orders-1.db", ("jobs", 5.0))
        (metrics.folder / "counter_orders-0.db").write_bytes(content)
        assert value(metrics, "jobs_total") == 5
        assert [file for file, _ in skipped] == ["counter_orders-0.db"]
        assert value(metrics, "jobs_total") == 5
        assert len(skipped) == 1

    def test_a_counter_does_not_fall(self, metrics: ChildMetrics) -> None:
        """What was read last from a file that became unreadable goes on to count, also after its successor counts."""
        path = write(metrics, "counter_orders-0.db", ("jobs", 7.0))
        write(metrics, "counter_orders-1.db", ("jobs", 5.0))
        assert value(metrics, "jobs_total") == 12
        path.write_bytes(b"noise")
        assert value(metrics, "jobs_total") == 12
        write(metrics, "counter_orders-0.db", ("jobs", 1.0))
        assert value(metrics, "jobs_total") == 13

    def test_a_folder_in_place_of_a_file_is_removed(self, metrics: ChildMetrics) -> None:
        """Hostile handlers make no scrape fail."""
        (metrics.folder / "counter_orders-0.db").mkdir()
        write(metrics, "counter_orders-1.db", ("jobs", 5.0))
        assert value(metrics, "jobs_total") == 5

    def test_a_handler_cannot_forge_our_metrics(self, metrics: ChildMetrics) -> None:
        """Names with our prefix are ours."""
        write(metrics, "counter_orders-0.db", ("pgmq_supervisor_messages_succeeded", 9.0))
        assert list(metrics.collect()) == []


class TestFolder:
    def test_folders_of_dead_runs_are_removed(self, tmp_path: Path) -> None:
        """A killed supervisor leaves files; the next start removes them, and none of a living one."""
        dead = tmp_path / "pgmq-supervisor-metrics-dead"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "counter_0.db").touch()
        living = ChildMetrics(tmp_path, on_skipped=lambda *_: None)
        other = ChildMetrics(tmp_path, on_skipped=lambda *_: None)
        assert not dead.exists()
        assert living.folder.exists()
        living.close()
        other.close()
        assert list(tmp_path.iterdir()) == []

    def test_a_planted_link_is_not_followed(self, tmp_path: Path) -> None:
        """Removing must not reach outside."""
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "lock").touch()
        (tmp_path / "pgmq-supervisor-metrics-link").symlink_to(precious)
        ChildMetrics(tmp_path, on_skipped=lambda *_: None).close()
        assert (precious / "lock").exists()

    def test_names_are_taken_apart(self) -> None:
        """Kind, mode and identity; queues have underscores."""
        assert split_name("counter_my_queue-0.db") == ("counter", "", "my_queue-0")
        assert split_name("gauge_livesum_my_queue-0.17.db") == ("gauge", "livesum", "my_queue-0.17")
        assert split_name("lock") == ("", "", "")


def test_a_scrape_after_thousands_of_restarts_is_fast(metrics: ChildMetrics) -> None:
    """5 000 successive processes on 8 identities leave 16 files, and a scrape takes a fraction of 100 ms."""
    for number in range(5000):
        identity = f"orders-{number % 8}"
        gauge = f"gauge_livesum_{identity}.{number + 10}.db"
        (metrics.folder / gauge).touch()
        if number < 80:
            write(metrics, f"counter_{identity}.db", *((f"jobs_{metric}", 1.0) for metric in range(30)))
        metrics.forget(number + 10)
    registry = CollectorRegistry()
    registry.register(metrics)
    generate_latest(registry)
    started = time.perf_counter()
    generate_latest(registry)
    assert time.perf_counter() - started < 0.1
    assert len(os.listdir(metrics.folder)) == 9

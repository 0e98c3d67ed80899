"""CPU that a child spends on a message whose handler does nothing: `python tests/bench/child_cost.py [messages]`.

The parent's half here is a bare loop, so that what is measured is the child with its system calls, and the
switches between the two processes. Prints one line a round; the best round is the one with the fewest neighbours.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.wire.frames import HEADER, encode_dispatch
from tests.support.childharness import ChildHarness

ROUNDS = 5
ANSWER_BYTES = HEADER.size  # SUCCESS


def cpu_us(pid: int) -> float:
    """CPU time of a process in microseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1000


def run_round(child: ChildHarness, messages: int) -> tuple[float, float]:
    """Microseconds of the child's CPU and of wall time a message."""
    frames = [encode_dispatch((n, n, 1, 1, 1, 60_000, b"", b'{"n": 1}')) for n in range(1, messages + 1)]
    cpu, wall = cpu_us(child.pid), time.perf_counter()
    for frame in frames:
        os.write(child.out_fd, frame)
        received = 0
        while received < ANSWER_BYTES:
            received += len(os.read(child.in_fd, 4096))
    return (cpu_us(child.pid) - cpu) / messages, (time.perf_counter() - wall) / messages * 1e6


def main() -> None:
    """Print the cost of some rounds."""
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    began = time.perf_counter()
    with ChildHarness("plain:succeed") as child:
        rss_kb = child.ready.meta["rss_kb"] if child.ready is not None else 0
        print(f"start to READY {(time.perf_counter() - began) * 1000:.0f} ms, resident {rss_kb / 1024:.1f} MiB")
        for _ in range(ROUNDS):
            cpu, wall = run_round(child, messages)
            print(f"{cpu:6.2f} us CPU of the child a message, {wall:6.2f} us wall")


if __name__ == "__main__":
    main()

"""What a message costs its child where the handler does nothing: `python tests/bench/child_cost.py [messages]`.

The parent's half here is a bare loop on the same processor, so that what is measured is the child with its system
calls. One child alone finds its memory in the caches at each message. With eight that take turns, as under load, each
has to fetch most of it again: that is the figure that counts (ADR 0026). The best of some rounds is the one with the
fewest neighbours.
"""

from __future__ import annotations

import contextlib
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


def run_round(children: list[ChildHarness], messages: int) -> float:
    """Microseconds of the children's CPU a message; each gets one in its turn, then each is heard."""
    frames = [encode_dispatch((n, n, 1, 1, 1, -1, b"", b'{"n": 1}')) for n in range(1, messages + 1)]
    before = sum(cpu_us(child.pid) for child in children)
    for frame in frames:
        for child in children:
            os.write(child.out_fd, frame)
        for child in children:
            received = 0
            while received < ANSWER_BYTES:
                received += len(os.read(child.in_fd, 4096))
    return (sum(cpu_us(child.pid) for child in children) - before) / (messages * len(children))


def main() -> None:
    """Print the cost with one child and with more that take turns."""
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the children inherit it
    for count in (1, 2, 4, 8):
        with contextlib.ExitStack() as stack:
            began = time.perf_counter()
            children = [stack.enter_context(ChildHarness("plain:succeed")) for _ in range(count)]
            boot_ms = (time.perf_counter() - began) / count * 1000
            run_round(children, messages // 10)
            best = min(run_round(children, messages) for _ in range(ROUNDS))
            rss_kb = children[0].ready.meta["rss_kb"] if children[0].ready is not None else 0
            print(
                f"{count} children: {best:5.1f} us of CPU a message"
                f" (start to READY {boot_ms:.0f} ms, resident {rss_kb / 1024:.1f} MiB)",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""CPU that a message costs the supervisor between dispatch and result, system calls included.

    python tests/bench/channel_cost.py [--loop uvloop|asyncio] [--children N] [--seconds S] [--body BYTES]

Real children run an empty handler; each result is answered by the next dispatch, one in flight a child. Prints one
JSON line: CPU of this process per message, loop and this loop's own commands included, and the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvloop

from shared.clock import boottime
from supervisor.core.commands import Dispatch, StartChild
from supervisor.core.events import ChildReady, Event, MessageFinished
from supervisor.core.types import ChildId, ClaimId, QueueName
from supervisor.processes.processes import Processes
from supervisor.processes.spec import ChildSpec


async def measure(*, children: int, seconds: float, body: bytes, app_dir: str) -> dict[str, float]:
    """Run for a while and divide."""
    done = 0
    claims = 0
    ready = asyncio.Event()
    waiting = children
    running = True

    def post(event: Event) -> None:
        nonlocal done, claims, waiting
        if type(event) is MessageFinished:
            done += 1
            if running:
                dispatch(event.child)
        elif isinstance(event, ChildReady):
            waiting -= 1
            if not waiting:
                ready.set()

    def dispatch(child: ChildId) -> None:
        nonlocal claims
        claims += 1
        loop.call_soon(
            processes.dispatch,
            Dispatch(child, ClaimId(claims), claims, 1, 1, 1, 1800.0, None, body, lease_deadline=boottime() + 3600),
        )

    loop = asyncio.get_running_loop()
    processes = Processes(
        queues={"q": ChildSpec(handler="app:handle", app_dir=app_dir)},
        post=post,
        clock=boottime,
        on_output=lambda *_: None,
        on_log=lambda *_: None,
        on_swept=lambda *_: None,
        supervisor_name="bench",
    )
    await processes.start()
    for number in range(1, children + 1):
        processes.start_child(StartChild(ChildId(number), QueueName("q"), number, 1))
    await ready.wait()
    for number in range(1, children + 1):
        dispatch(ChildId(number))
    await asyncio.sleep(0.2)
    before, began, first = time.process_time(), time.monotonic(), done
    await asyncio.sleep(seconds)
    after, took, count = time.process_time(), time.monotonic() - began, done - first
    running = False
    await processes.close()
    return {
        "messages": count,
        "rate_per_s": round(count / took),
        "cpu_us": round((after - before) / count * 1e6, 2),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--body", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as app_dir:
        Path(app_dir, "app.py").write_text("def handle(message): ...\n")
        factory = uvloop.new_event_loop if options.loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            figures = runner.run(
                measure(
                    children=options.children,
                    seconds=options.seconds,
                    body=b'"' + b"x" * options.body + b'"',
                    app_dir=app_dir,
                )
            )
    print(json.dumps({"loop": options.loop, "children": options.children, **figures}))


main()

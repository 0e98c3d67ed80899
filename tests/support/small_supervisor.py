"""A supervisor without a database: runs `Processes` and prints what it hears, for tests that kill or freeze it.

    small_supervisor.py APP_DIR CHILDREN LEASE_S [loop]      each child gets one message with that lease (0: none)

Lines on stdout: `parent PID`, `guard PID`, `child PID`, `dispatched`, whatever handlers print, `died SIGNAL`.
SIGUSR1 kills the children in order and ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.clock import boottime
from supervisor.core.commands import Dispatch, StartChild
from supervisor.core.events import ChildDied, ChildReady, ChildSpawned, Event
from supervisor.core.types import ChildId, ClaimId, QueueName
from supervisor.processes.processes import Processes
from supervisor.processes.spec import ChildSpec


def say(*words: object) -> None:
    """One line."""
    print(*words, flush=True)


async def main(app_dir: str, children: int, lease_s: float) -> None:
    """Run until SIGUSR1."""
    said: asyncio.Queue[Event] = asyncio.Queue()
    processes = Processes(
        queues={"q": ChildSpec(handler="app:handle", app_dir=app_dir)},
        post=said.put_nowait,
        clock=boottime,
        on_output=lambda _child, _claim, _stream, line: say(line),
        on_log=lambda *_: None,
        on_swept=lambda _queue, count: say("swept", count),
        supervisor_name="small",
    )
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, over.set)
    await processes.start()
    say("parent", os.getpid())
    say("guard", processes._guard.pid)
    for number in range(1, children + 1):
        processes.start_child(StartChild(ChildId(number), QueueName("q"), number, 1))
    stop = asyncio.create_task(over.wait())
    while not stop.done():
        heard = asyncio.create_task(said.get())
        await asyncio.wait({stop, heard}, return_when=asyncio.FIRST_COMPLETED)
        if not heard.done():
            heard.cancel()
            break
        match heard.result():
            case ChildSpawned(_, pid):
                say("child", pid)
            case ChildReady(child):
                deadline = boottime() + lease_s if lease_s else 0.0
                processes.dispatch(
                    Dispatch(child, ClaimId(child), child, 1, 1, 1, None, None, b"1", lease_deadline=deadline)
                )
                say("dispatched")
            case ChildDied(_, facts):
                say("died", facts.signal, *(["oom"] if facts.oom else []))
            case _:
                pass
    await processes.close()
    say("closed")


if len(sys.argv) > 4:
    import uvloop

    uvloop.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
else:
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

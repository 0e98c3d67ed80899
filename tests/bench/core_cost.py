"""CPU of the core alone per no-op message: claim, dispatch, start, result, settlement, without any I/O."""

from __future__ import annotations

import random
import sys
import time

from shared.pgmq.records import ClaimedRow, Fence, SettleOutcome, SettleResult
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.core import Core
from supervisor.core.settings import CoreSettings, QueueSettings
from supervisor.core.types import SUCCESS, QueueName

_QUEUE = QueueName("q")


def run(messages: int, children: int) -> float:
    """Microseconds per message."""
    queue = QueueSettings(name="q", handler="a:b", dead_letter_queue="q_dlq", concurrency=children)
    core = Core(CoreSettings(queues=(queue,), host="h", supervisor="s", version="0"), random.Random(1).random)
    now, msg_id = 0.0, 0
    todo: list[e.Event] = [e.Started()]
    done = 0
    began = time.process_time()
    while done < messages:
        event = todo.pop(0)
        now += 1e-5
        settle: list[SettleResult] = []
        for command in core.handle(event, now):
            match command:
                case c.StartChild(child=child):
                    todo += [e.ChildSpawned(child, int(child)), e.ChildReady(child, 1000)]
                case c.Claim(limit=limit):
                    rows = tuple(
                        ClaimedRow(Fence(n, 1, 1), 30.0, 1, 1, None, None, b"{}", True, 2)
                        for n in range(msg_id, msg_id + limit)
                    )
                    msg_id += limit
                    todo.append(e.Claimed(_QUEUE, limit, now, rows, None))
                case c.Dispatch(child=child, claim_id=claim_id):
                    todo += [e.MessageStarted(child, claim_id), e.MessageFinished(child, claim_id, SUCCESS)]
                case c.Settle(items=items):
                    settle += [SettleResult(item.claim_id, SettleOutcome.DONE) for item in items]
                case _:
                    pass
        if settle:
            todo.append(e.Settled(_QUEUE, tuple(settle)))
            done += len(settle)
        core.next_deadline()
    return (time.process_time() - began) / messages * 1e6


if __name__ == "__main__":
    sys.stdout.write(f"{min(run(20_000, 8) for _ in range(3)):.1f} us per message\n")

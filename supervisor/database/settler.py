"""The settler: carries verdicts out, batched naturally — what came in while the last statement ran goes in the next.

A batch is of one kind, in one transaction: acknowledgements share none with dead letters, whose queue may be gone. A
batch that fails is halved until the guilty message stands alone; where the server itself is at fault (a missing table,
a full disk) its first and its last message are tried alone before that. After a lost connection it is said again,
which is safe: the fence guards it and the values are absolute; a row that is gone then was settled before, or is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, assert_never

from shared import syncpoints
from shared.errors import ConnectionLost, OperationTimeout, SupervisorError
from shared.pgmq.records import (
    Ack,
    AckMode,
    DeadLetter,
    Release,
    Retry,
    SettleItem,
    SettleOutcome,
    SettleResult,
)
from shared.pgmq.statements import settling
from supervisor.core.commands import Settle
from supervisor.core.events import Event, Settled
from supervisor.core.types import QueueName
from supervisor.database.arrays import fences, integers
from supervisor.database.backoff import Backoff
from supervisor.database.connections import Connection
from supervisor.database.failures import is_of_the_server, is_transient, settle_failure, translate
from supervisor.database.sessions import Pool

__all__ = ["Settler"]

_TRIES: Final = 4
_LOCKED: Final = "somebody else holds a lock on the row"


class _Batch(NamedTuple):
    """Settlements of one kind: one statement, one transaction."""

    statement: bytes
    items: list[SettleItem]
    target: str | None  # of dead letters

    def parameters(self) -> dict[str, Any]:
        """Build the statement's parameters."""
        parameters: dict[str, Any] = fences([item.fence for item in self.items])
        settlements: list[Any] = [item.settlement for item in self.items]
        if self.target is not None:
            parameters["target"] = self.target
            parameters["envelopes"] = [settlement.envelope for settlement in settlements]
        elif not isinstance(settlements[0], Ack):
            parameters["delays"] = integers([settlement.delay_ms for settlement in settlements])
            parameters["accounts"] = [settlement.accounts for settlement in settlements]
        return parameters

    def parts(self, *ends: int) -> list[_Batch]:
        """Split behind each of these places."""
        bounds = [0, *ends, len(self.items)]
        return [self._replace(items=self.items[start:end]) for start, end in itertools.pairwise(bounds)]


_settlement: Final = operator.attrgetter("settlement")


class Settler:
    """Answers every item of a `Settle` with one `SettleResult`.

    `patience_s`: of each queue, how long one try may take. An answer that does not come must leave time, inside the
    lease, for another try.
    """

    def __init__(self, pool: Pool, patience_s: Mapping[QueueName, float], post: Callable[[Event], None]) -> None:
        self._lanes = {queue: _Lane(pool, queue, timeout_s, post) for queue, timeout_s in patience_s.items()}

    def settle(self, command: Settle) -> None:
        """Start settlements."""
        self._lanes[command.queue].add(command.items)

    async def close(self, drain_s: float) -> None:
        """Carry out what was given, at most for `drain_s`, and stop."""
        await asyncio.gather(*(lane.close(drain_s) for lane in self._lanes.values()))


class _Lane:
    """The settlements of one queue, one statement at a time."""

    def __init__(self, pool: Pool, queue: QueueName, timeout_s: float, post: Callable[[Event], None]) -> None:
        self._pool = pool
        self._queue = queue
        self._timeout_s = timeout_s
        self._post = post
        self._pending: list[SettleItem] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._task = asyncio.create_task(self._run(), name=f"settle {queue}")

    def add(self, items: tuple[SettleItem, ...]) -> None:
        self._pending += items
        self._idle.clear()
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                items, self._pending = self._pending, []
                for batch in _batches(self._queue, items):
                    await self._settle(batch)
            self._idle.set()

    async def _settle(self, batch: _Batch) -> None:
        """Carry one batch out and answer it, whatever happens."""
        try:
            results = await self._carry_out(batch)
        except Exception as error:  # noqa: BLE001 - the boundary of this task: an answer is owed for every item
            results = _failures(batch, translate(error, "settle"))
        self._post(Settled(self._queue, tuple(results)))

    async def _carry_out(self, batch: _Batch) -> list[SettleResult]:
        """Say it, again after a lost connection, in parts after an error; what does not work fails alone."""
        backoff = Backoff(base_s=0.1, limit_s=2.0)
        for tries_left in reversed(range(_TRIES)):
            try:
                return await self._pool.run("settle", lambda c: self._say(c, batch), self._timeout_s)
            except SupervisorError as error:
                again = isinstance(error, ConnectionLost) or is_transient(error)
                late = isinstance(error, OperationTimeout)  # a smaller batch would be late as well
                if not again and not late and len(batch.items) > 1:
                    return await self._carry_out_in_parts(batch, error)
                if not again or not tries_left or self._closing:
                    return _failures(batch, error)
            await asyncio.sleep(backoff.next_s())
        raise AssertionError("the last try returns")

    async def _carry_out_in_parts(self, batch: _Batch, error: SupervisorError) -> list[SettleResult]:
        count = len(batch.items)
        if not is_of_the_server(error) or count <= 2:
            first, second = batch.parts(count // 2)
            return await self._carry_out(first) + await self._carry_out(second)
        # Thousands of statements must not tell a full disk what two can tell.
        first, middle, last = batch.parts(1, count - 1)
        ends = await self._carry_out(first), await self._carry_out(last)
        if all(result.outcome is SettleOutcome.FAILED for (result,) in ends):
            return ends[0] + _failures(middle, error) + ends[1]
        return ends[0] + await self._carry_out(middle) + ends[1]

    async def _say(self, connection: Connection, batch: _Batch) -> list[SettleResult]:
        items = batch.items
        ids: dict[str, int | str] = {"queue": self._queue, "count": len(items), "msg_id": items[0].fence.msg_id}
        syncpoints.hit("parent.settle.before", ids)
        cursor = connection.cursor(binary=True)
        # Only these are said often. Those of a queue that is quiet cost less than half when they are planned already.
        prepare = True if isinstance(items[0].settlement, Ack) else None
        await cursor.execute(batch.statement, batch.parameters(), prepare=prepare)
        done = {number for (number,) in await cursor.fetchall() if number is not None}
        syncpoints.hit("parent.settle.after", ids)
        if len(done) == len(items):
            return [SettleResult(item.claim_id, SettleOutcome.DONE) for item in items]
        return await self._explain(connection, items, done)

    async def _explain(self, connection: Connection, items: list[SettleItem], done: set[int]) -> list[SettleResult]:
        """Tell the rows that are locked by others, to be asked for again, from those that are not ours any more."""
        skipped = [number for number in range(1, len(items) + 1) if number not in done]
        cursor = connection.cursor(binary=True)
        needs_lease = not isinstance(items[0].settlement, Release)
        wanted = fences([items[number - 1].fence for number in skipped])
        await cursor.execute(settling.still_ours(self._queue), {"needs_lease": needs_lease, **wanted})
        locked = {skipped[place - 1] for (place,) in await cursor.fetchall()}
        results = []
        for number, item in enumerate(items, start=1):
            if number in done:
                results.append(SettleResult(item.claim_id, SettleOutcome.DONE))
            elif number in locked:
                results.append(SettleResult(item.claim_id, SettleOutcome.FAILED, _LOCKED))
            else:
                results.append(SettleResult(item.claim_id, SettleOutcome.GONE))
        return results

    async def close(self, drain_s: float) -> None:
        self._closing = True
        await asyncio.wait({waiting := asyncio.ensure_future(self._idle.wait())}, timeout=drain_s)
        waiting.cancel()
        self._task.cancel()
        await asyncio.wait({self._task})


def _failures(batch: _Batch, error: SupervisorError) -> list[SettleResult]:
    failure = settle_failure(error, alone=len(batch.items) == 1)
    return [SettleResult(item.claim_id, SettleOutcome.FAILED, str(error), failure) for item in batch.items]


def _batches(queue: str, items: list[SettleItem]) -> Iterator[_Batch]:
    """Sort by kind; what is quick and frees most comes first."""
    kinds: dict[tuple[int, str | None], list[SettleItem]] = {}
    for settlement, alike in itertools.groupby(items, _settlement):  # successes share theirs
        match settlement:
            case Ack():
                key: tuple[int, str | None] = (0 if settlement.mode is AckMode.DELETE else 1, None)
            case Release():
                key = (2, None)
            case Retry():
                key = (3, None)
            case DeadLetter():
                key = (4, settlement.queue)
            case never:
                assert_never(never)
        kinds.setdefault(key, []).extend(alike)
    for kind, target in sorted(kinds, key=lambda key: (key[0], key[1] or "")):
        compose, most = _STATEMENTS[kind]
        statement = compose(queue)
        same = kinds[kind, target]
        for start in range(0, len(same), most):
            yield _Batch(statement, same[start : start + most], target)


# Kind: its statement, and how many go into one; dead letters carry texts of up to several hundred kilobytes.
_STATEMENTS: Final[dict[int, tuple[Callable[[str], bytes], int]]] = {
    0: (settling.ack_delete, 1000),
    1: (settling.ack_archive, 500),
    2: (settling.release, 500),
    3: (settling.retry, 500),
    4: (settling.dead_letter, 25),
}

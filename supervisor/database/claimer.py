"""The claimer: takes messages for the core, at most two claims at a time for each queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from shared import syncpoints
from shared.errors import SupervisorError
from shared.pgmq.records import ClaimedRow, Fence
from shared.pgmq.statements import claiming
from supervisor.core.commands import Claim, FetchBody
from supervisor.core.events import BodyFetched, BodyFetchFailed, Claimed, ClaimFailed, Event
from supervisor.core.types import QueueName
from supervisor.database.connections import Connection
from supervisor.database.failures import is_of_the_message, is_permanent, translate
from supervisor.database.line import Line
from supervisor.database.sessions import Pool

__all__ = ["BodyFetcher", "Claimer"]


class _Reach(NamedTuple):
    """What a claim brings along."""

    messages: int | None  # at most so many; None: as the core asked
    body_limit: int
    headers_limit: int


# A message can make its own text impossible: [1e131071, 1e131071, ...] is small in the table and gigabytes as text.
# Where a claim fails of such a thing it is tried with less, one message at a time: without bodies, then without
# headers; so that the guilty one is claimed all the same, and can be dead-lettered inside the database.
_REACHES: Final = (
    _Reach(None, claiming.BODY_LIMIT, claiming.NO_LIMIT),
    _Reach(1, -1, claiming.NO_LIMIT),
    _Reach(1, -1, -1),
)


_STEP: Final = 20


class Claimer:
    """Answers every `Claim` with exactly one `Claimed` or `ClaimFailed`."""

    def __init__(
        self,
        pool: Pool,
        patience_s: Mapping[QueueName, float],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """`patience_s`: of each queue, how long a claim may take; what comes later has lost its lease on the way."""
        self._pool = pool
        self._patience_s = patience_s
        self._post = post
        self._clock = clock
        self._lines = {
            queue: tuple(Line(f"claim {queue}", self._work, self._failed) for _ in range(2)) for queue in patience_s
        }

    def claim(self, command: Claim) -> None:
        """Start a claim."""
        first, second = self._lines[command.queue]
        (first if first.idle else second).put(command)

    async def _work(self, command: Claim) -> None:
        timeout_s = self._patience_s[command.queue]
        self._post(await self._pool.run("claim", lambda connection: self._take(connection, command), timeout_s))

    def _failed(self, command: Claim, error: Exception) -> None:
        self._post(ClaimFailed(command.queue, str(translate(error, "claim"))))

    async def _take(self, connection: Connection, command: Claim) -> Claimed:
        for reach in _REACHES[:-1]:
            try:
                return await self._take_within(connection, command, reach)
            except Exception as error:
                if not is_of_the_message(translate(error, "claim")):
                    raise
        return await self._take_within(connection, command, _REACHES[-1])

    async def _take_within(self, connection: Connection, command: Claim, reach: _Reach) -> Claimed:
        queue = command.queue
        syncpoints.hit("parent.claim.before", {"queue": queue})
        limit = _in_steps(command.limit) if reach.messages is None else min(reach.messages, command.limit)
        asked_at = self._clock()
        cursor = connection.cursor(binary=True)
        await cursor.execute(
            claiming.claim(queue, limit),
            {
                "lease_ms": round(command.lease_s * 1000),
                "budget": command.byte_budget,
                "body_limit": reach.body_limit,
                "headers_limit": reach.headers_limit,
            },
            prepare=True,
        )
        found = await cursor.fetchall()
        if found[0][0] is None:
            await cursor.execute(claiming.next_visible(queue), {"since_us": found[0][-1]})
            following = await cursor.fetchone()
            return Claimed(queue, limit, asked_at, (), following[0] if following else None)
        syncpoints.hit("parent.claim.after", {"queue": queue, "count": len(found), "msg_id": found[0][0]})
        return Claimed(queue, limit, asked_at, _rows(found), None, full=len(found) == _in_steps(command.limit))

    async def close(self) -> None:
        """Stop; a claim under way is given up."""
        for lines in self._lines.values():
            for line in lines:
                await line.close()


def _in_steps(limit: int) -> int:
    """Each limit is a statement of its own, which the server keeps planned: there must not be too many of them."""
    return limit if limit <= _STEP else limit - limit % _STEP


def _rows(found: list[tuple[Any, ...]]) -> tuple[ClaimedRow, ...]:
    return tuple(
        [
            ClaimedRow(
                Fence(msg_id, read_ct, read_us), lease_s, enqueued, visible, headers, accounts, body, loaded, size
            )
            for (
                msg_id,
                read_ct,
                read_us,
                lease_s,
                enqueued,
                visible,
                headers,
                accounts,
                body,
                loaded,
                size,
                _,
            ) in found
        ]
    )


class BodyFetcher:
    """Loads bodies that were too large to come with their claim, one at a time; exactly one answer each."""

    def __init__(self, pool: Pool, post: Callable[[Event], None]) -> None:
        self._pool = pool
        self._post = post
        self._line = Line("bodies", self._work, self._failed)

    def fetch_body(self, command: FetchBody) -> None:
        """Start a load."""
        self._line.put(command)

    async def _work(self, command: FetchBody) -> None:
        async def load(connection: Connection) -> tuple[Any, ...] | None:
            cursor = connection.cursor(binary=True)
            msg_id, read_ct, read_us = command.fence
            await cursor.execute(
                claiming.fetch_body(command.queue), {"msg_id": msg_id, "read_ct": read_ct, "read_us": read_us}
            )
            return await cursor.fetchone()

        row = await self._pool.run("fetch body", load)
        self._post(BodyFetched(command.queue, command.claim_id, row is not None, row[0] if row else None))

    def _failed(self, command: FetchBody, error: Exception) -> None:
        failure: SupervisorError = translate(error, "fetch body")
        self._post(BodyFetchFailed(command.queue, command.claim_id, str(failure), is_permanent(failure)))

    async def close(self) -> None:
        """Stop."""
        await self._line.close()

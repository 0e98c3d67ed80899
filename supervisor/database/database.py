"""The database side of the shell: carries out the core's commands and posts the events that answer them.

claims ───▶ Claimer ──┐                        ┌── Listener ──▶ LISTEN on a connection of its own
bodies ───▶ Fetcher ──┼──▶ Pool of sessions ◀──┤── Keeper       trigger and throttle row
verdicts ─▶ Settler ──┘                        └── Pauses       our own table
renewals ─▶ Renewer ─────▶ sessions of its own
reckoning ▶ Reckoner ────▶ a session of its own, older than the children's
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shared.clock import boottime
from shared.errors import SupervisorError, UnsupportedError
from shared.pgmq.statements import queues as queue_statements
from shared.pgmq.statements import server
from supervisor.core.commands import Claim, FetchBody, Reckon, Renew, Settle, TerminateBackend
from supervisor.core.events import Event
from supervisor.core.settings import QueueSettings
from supervisor.core.types import Mode, QueueName
from supervisor.database.claimer import BodyFetcher, Claimer
from supervisor.database.connections import Connection, ConnectionOptions, Connections, Detached
from supervisor.database.keeper import Keeper
from supervisor.database.listener import Listener
from supervisor.database.pauses import Pauses
from supervisor.database.reckoner import Reckoner
from supervisor.database.renewer import RENEW_SESSIONS, Renewer
from supervisor.database.sessions import SLACK_S, Pool, Session
from supervisor.database.settler import Settler
from supervisor.telemetry.facts import Fact, Noted

__all__ = ["Database", "QueueCounts", "sessions_of_parent"]

_AUTO_POOL_SIZE: Final = 4
_LOCK_TIMEOUT_S: Final = 0.5  # a locked table holds a session up no longer, others need it; rows are never waited for
_CLAIM_PATIENCE_S: Final = (2.0, 35.0)  # least and most, between which the lease decides


def sessions_of_parent(pool_size: int | None, *, regular_queues: int) -> int:
    """Give the most sessions that the parent has open at once: pool, listener, reckoner, renewals, a redrive."""
    return (pool_size or _AUTO_POOL_SIZE) + 3 + min(regular_queues, RENEW_SESSIONS)


def _tell_nobody(_: Fact) -> None:
    """Be the default of who does not want to know."""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Depth of a queue: what could be claimed now, and since when the oldest of it waits."""

    visible: int
    oldest_visible_s: float | None
    at_limit: bool  # there are at least `visible`; counting ended there


class Database:
    """Everything of the parent that speaks to PostgreSQL while it runs.

    `post` receives the events, `tell` facts for log and metrics; both are called on the event loop's thread. The six
    synchronous methods schedule work and never raise; each command is answered as its docstring says.
    """

    def __init__(
        self,
        dsn: str,
        listen_dsn: str | None = None,
        queues: Sequence[QueueSettings] = (),
        *,
        post: Callable[[Event], None],
        tell: Callable[[Fact], None] = _tell_nobody,
        clock: Callable[[], float] = boottime,
        pool_size: int | None = None,
        connect_timeout_s: float = 10.0,
        acquire_timeout_s: float = 30.0,
        statement_timeout_s: float = 30.0,
        heartbeat_s: float = 5.0,
        probe_s: float = 5.0,
        keep_interval_s: float = 30.0,
        pause_interval_s: float = 2.0,
    ) -> None:
        """Keep the parameters; nothing is opened. Raises `ConfigurationError` where a DSN cannot be read."""
        self._options = ConnectionOptions(
            connect_timeout_s=connect_timeout_s,
            acquire_timeout_s=acquire_timeout_s,
            statement_timeout_s=statement_timeout_s,
        )
        self._connections = Connections(
            dsn, replace(self._options, lock_timeout_s=min(_LOCK_TIMEOUT_S, statement_timeout_s))
        )
        self._listen_connections = Connections(listen_dsn or dsn, self._options)
        self._queues = tuple(QueueName(queue.name) for queue in queues)
        self._leases_s = {QueueName(queue.name): queue.visibility_timeout_s for queue in queues}
        self._has_transactional = any(queue.mode is Mode.TRANSACTIONAL for queue in queues)
        self._notified = tuple(QueueName(queue.name) for queue in queues if queue.notify)
        self._post_event = post
        self._tell = tell
        self._clock = clock
        self._pool_size = pool_size or _AUTO_POOL_SIZE
        self._heartbeat_s = heartbeat_s
        self._probe_s = probe_s
        self._keep_interval_s = keep_interval_s
        self._pause_interval_s = pause_interval_s
        self._closed = False
        self._drain_s = 0.0
        self._stack = contextlib.AsyncExitStack()
        self._writable = asyncio.Event()
        self.standby = False

    def _post(self, event: Event) -> None:
        if not self._closed:
            self._post_event(event)

    async def start(self) -> None:
        """Open what must be open before anything is claimed, and begin to listen.

        Raises `ConnectionLost` where the server cannot be reached and `UnsupportedError` where it has no PGMQ; then
        nothing stays open. A hot standby is no error: `standby` is true, it is told once, and claims fail until it is
        promoted.
        """
        try:
            await self._start()
        except BaseException:
            await self.close(drain_s=0.0)
            raise

    async def _start(self) -> None:
        detached = Detached()
        self._stack.push_async_callback(detached.close)
        self._pool = Pool(self._connections, self._pool_size, detached, self._tell)
        self._stack.callback(self._pool.close)
        await self._look_at_server()

        def session(role: str) -> Session:
            return Session(self._connections, role, detached, self._tell)

        self._reckoner = Reckoner(session("reckon"), self._post, self._tell)
        self._stack.push_async_callback(self._reckoner.close)
        if self._has_transactional:
            await self._reckoner.open()
        renewals = Pool(
            self._connections, min(len(self._queues), RENEW_SESSIONS) or 1, detached, self._tell, role="renew"
        )
        self._renewer = Renewer(renewals, self._queues, self._post, self._clock)
        self._stack.push_async_callback(self._renewer.close)
        self._bodies = BodyFetcher(self._pool, self._post)
        self._stack.push_async_callback(self._bodies.close)
        most_s = self._options.statement_timeout_s + SLACK_S
        # A claim that takes longer than its lease is none; a settlement that hangs must be repeated inside the lease.
        least_s, longest_s = _CLAIM_PATIENCE_S[0], min(most_s, _CLAIM_PATIENCE_S[1])
        claims_s = {queue: min(longest_s, max(least_s, lease_s)) for queue, lease_s in self._leases_s.items()}
        settles_s = {queue: min(most_s, max(1.0, lease_s / 3)) for queue, lease_s in self._leases_s.items()}
        self._claimer = Claimer(self._pool, claims_s, self._post, self._clock)
        self._stack.push_async_callback(self._claimer.close)
        self._pauses = Pauses(
            self._pool, self._queues, post=self._post, tell=self._tell, interval_s=self._pause_interval_s
        )
        self._stack.push_async_callback(self._pauses.close)
        await self._pauses.start()
        if self._notified:
            keeper = Keeper(
                self._pool, self._notified, self._tell, writable=self._writable, interval_s=self._keep_interval_s
            )
            self._stack.push_async_callback(keeper.close)
            listener = Listener(
                self._listen_connections,
                self._pool,
                self._notified,
                detached=detached,
                post=self._post,
                tell=self._tell,
                on_up=keeper.check_soon,
                writable=self._writable,
                heartbeat_s=self._heartbeat_s,
                probe_s=self._probe_s,
            )
            self._stack.push_async_callback(listener.close)
        self._settler = Settler(self._pool, settles_s, self._post)
        self._stack.push_async_callback(self._close_settler)  # first to close, while all else still works

    async def _close_settler(self) -> None:
        await self._settler.close(self._drain_s)

    async def _look_at_server(self) -> None:
        async def look(connection: Connection) -> tuple[bool, bool]:
            cursor = await connection.execute(server.FACTS)
            row = await cursor.fetchone()
            assert row is not None
            return row[1], row[3]

        self.standby, has_pgmq = await self._pool.run("connect", look, self._options.connect_timeout_s * 2)
        if not has_pgmq:
            raise UnsupportedError(
                "this database has no PGMQ", operation="start", remedy="run `pgmq-supervisor init` once"
            )
        if self.standby:
            self._tell(Noted("database", "warning", "this server is a hot standby: nothing is claimed until promotion"))
        else:
            self._writable.set()

    async def close(self, drain_s: float = 1.0) -> None:
        """Carry out the settlements that were given, at most for `drain_s`; then close everything. Safe to repeat.

        Short: the core has waited for what it could wait for, and a stop is bounded by grace and kill_after.
        """
        self._drain_s = drain_s
        await self._stack.aclose()
        self._closed = True

    # --- the core's commands ------------------------------------------------------------------------------------------

    def claim(self, command: Claim) -> None:
        """Exactly one `Claimed` or `ClaimFailed` answers."""
        self._claimer.claim(command)

    def fetch_body(self, command: FetchBody) -> None:
        """Exactly one `BodyFetched` or `BodyFetchFailed` answers."""
        self._bodies.fetch_body(command)

    def renew(self, command: Renew) -> None:
        """Exactly one `Renewed` or `RenewFailed` answers, within the command's timeout."""
        self._renewer.renew(command)

    def settle(self, command: Settle) -> None:
        """One `SettleResult` answers each item, in one or more `Settled`."""
        self._settler.settle(command)

    def reckon(self, command: Reckon) -> None:
        """Exactly one `Reckoned` answers."""
        self._reckoner.reckon(command)

    def terminate_backend(self, command: TerminateBackend) -> None:
        """Nothing answers."""
        self._reckoner.terminate_backend(command)

    # --- for the rest of the shell ------------------------------------------------------------------------------------

    async def pause(self, queue: QueueName, by: str) -> bool:
        """Pause a queue for every supervisor; False: only here. Posts `PauseChanged`."""
        return await self._pauses.pause(queue, by)

    async def resume(self, queue: QueueName) -> bool:
        """Resume a queue; False: the table could not be changed. Posts `PauseChanged`."""
        return await self._pauses.resume(queue)

    async def counts(self, queue: str, limit: int = 1_000_000) -> QueueCounts | None:
        """Count what is visible, up to `limit`; None where the database does not answer. Ask seldom."""

        async def count(connection: Connection) -> QueueCounts:
            cursor = await connection.execute(queue_statements.sample(queue), {"limit": limit})
            row = await cursor.fetchone()
            assert row is not None
            visible, oldest_s = row
            return QueueCounts(visible, oldest_s, at_limit=visible >= limit)

        try:
            return await self._pool.run("count", count)
        except SupervisorError:
            return None

    async def ping(self, timeout_s: float = 5.0) -> bool:
        """Tell whether the database answers, and can be written to; keeps `standby` up to date."""

        async def ask(connection: Connection) -> bool:
            cursor = await connection.execute(server.IN_RECOVERY)
            row = await cursor.fetchone()
            return bool(row and row[0])

        try:
            async with asyncio.timeout(timeout_s + 1.0):
                self.standby = await self._pool.run("ping", ask, timeout_s)
        except (SupervisorError, TimeoutError):
            return False
        if not self.standby:
            self._writable.set()
        return not self.standby

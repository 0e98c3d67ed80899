"""What the command line does with queues: blocking calls over one autocommit connection, errors mapped to ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import psycopg

from shared.errors import DatabaseError, SupervisorError
from shared.naming import validate_queue_name
from shared.pgmq.statements import notifying, queues, server
from supervisor.database.failures import translate

__all__ = ["Admin", "DeadLetterRow", "QueueRow"]

_LOCK_TIMEOUT_MS: Final = 5000
_CREATE: Final = {
    "durable": queues.CREATE,
    "unlogged": queues.CREATE_UNLOGGED,
    "partitioned": queues.CREATE_PARTITIONED,
}


class QueueRow(NamedTuple):
    """One queue, counted."""

    name: str
    storage: str
    visible: int
    in_flight: int
    delayed: int
    archived: int | None
    oldest_visible_s: float | None


class DeadLetterRow(NamedTuple):
    """One dead letter in a list. Texts as they stand in its document."""

    msg_id: int
    reason: str | None
    source_msg_id: str | None
    attempt: str | None
    deaths: str | None
    error_type: str | None
    error_message: str | None
    cause: str | None
    dead_lettered_at: str | None


class Admin:
    """Operations on queues. All raise a `SupervisorError`; none repeats a write."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    # ------------------------------------------------------------------ queues

    def exists(self, queue: str) -> bool:
        """Whether the queue's table is there. Raises for a database without PGMQ."""
        validate_queue_name(queue)
        with _mapped("look for a queue"):
            row = self._connection.execute("select to_regclass('pgmq.meta') is not null").fetchone()
            if row is None or not row[0]:
                raise DatabaseError("PGMQ is not installed in this database", remedy="run `pgmq-supervisor init` once")
            found = self._connection.execute(queues.TABLES, {"queue": queue}).fetchone()
        return found is not None and bool(found[0])

    def require_queue(self, queue: str) -> None:
        """Raise unless the queue is there."""
        if not self.exists(queue):
            raise DatabaseError(
                f"there is no queue {queue}",
                remedy=f"make it with `pgmq-supervisor queues create {queue}`, or all configured ones with `init`",
            )

    def list_queues(self) -> Iterator[QueueRow]:
        """Count every queue, one after the other."""
        self.exists("any")
        with _mapped("list queues"):
            rows = self._connection.execute(queues.LIST).fetchall()
        for name, partitioned, unlogged in rows:
            storage = "partitioned" if partitioned else "unlogged" if unlogged else "durable"
            try:
                with _mapped("count a queue"):
                    counted = self._connection.execute(queues.counts(name)).fetchone()
                    archived = self._connection.execute(queues.count_archived(name)).fetchone()
            except SupervisorError as error:
                if error.sqlstate == "42P01":
                    continue  # dropped meanwhile
                raise
            assert counted is not None
            visible, in_flight, delayed, oldest_visible_s = counted
            total = None if archived is None else archived[0]
            yield QueueRow(name, storage, visible, in_flight, delayed, total, oldest_visible_s)

    def create(self, queue: str, storage: str = "durable") -> bool:
        """Make a queue; tells whether it was missing."""
        if self.exists(queue):
            return False
        with _mapped("create a queue"), self._connection.transaction():
            self._connection.execute(_CREATE[storage], {"queue": queue})
        return True

    def enable_notifications(self, queue: str) -> bool:
        """Make trigger and throttle row where one is missing; tells whether it was."""
        parameters = {"queue": queue, "throttle_ms": notifying.THROTTLE_MS}
        with _mapped("enable notifications"), self._connection.transaction():
            self._connection.execute(queues.SET_LOCK_TIMEOUT, {"timeout_ms": str(_LOCK_TIMEOUT_MS)})
            self._connection.execute(notifying.LOCK_QUEUE, {"queue": queue})
            found = self._connection.execute(notifying.CHECK, {"queue": queue}).fetchone()
            assert found is not None
            if not found[1]:
                self._connection.execute(notifying.ENABLE, parameters)
            elif not found[2]:
                self._connection.execute(notifying.REPAIR_ROW, parameters)
            return not (found[1] and found[2])

    def drop(self, queue: str) -> None:
        """Drop a queue with its archive; waits for locks no longer than a few seconds."""
        self.require_queue(queue)
        try:
            with _mapped("drop a queue"), self._connection.transaction():
                self._connection.execute(queues.SET_LOCK_TIMEOUT, {"timeout_ms": str(_LOCK_TIMEOUT_MS)})
                self._connection.execute(queues.DROP, {"queue": queue})
        except SupervisorError as error:
            if error.sqlstate == "55P03":
                raise DatabaseError(
                    f"the queue is in use: its lock was not free within {_LOCK_TIMEOUT_MS // 1000} s",
                    operation="drop a queue",
                    sqlstate=error.sqlstate,
                    remedy="stop what works on it, then try again",
                ) from error
            raise

    def purge(self, queue: str, *, batch: int = 10_000) -> Iterator[int]:
        """Delete what is not in flight, a batch at a time; gives the size of each."""
        self.require_queue(queue)
        while True:
            with _mapped("purge"):
                row = self._connection.execute(queues.purge_batch(queue), {"limit": batch}).fetchone()
            if row is None or not row[0]:
                return
            yield row[0]

    def create_schema(self) -> bool:
        """Make our schema; tells whether it was missing."""
        with _mapped("create our schema"), self._connection.transaction():
            self._connection.execute(server.LOCK_SCHEMA)
            found = self._connection.execute(server.PAUSED_TABLE).fetchone()
            if found is not None and found[0]:
                return False
            for statement in server.CREATE_SCHEMA:
                self._connection.execute(statement)
        return True

    # ------------------------------------------------------------------ messages

    def send_batch(self, queue: str, bodies: Sequence[str], *, headers: str | None, delay_ms: int) -> Sequence[int]:
        """Send JSON texts in one statement; gives their numbers. Never repeated here: the answer may have been lost."""
        parameters = {
            "queue": queue,
            "bodies": list(bodies),
            "headers": None if headers is None else [headers] * len(bodies),
            "delay_ms": delay_ms,
        }
        with _mapped("send"):
            return [row[0] for row in self._connection.execute(queues.SEND_BATCH, parameters)]

    # ------------------------------------------------------------------ dead letters

    def dead_letters(self, dlq: str, source: str, *, after: int, limit: int) -> list[DeadLetterRow]:
        """One page of the dead letters of a source, by their numbers."""
        parameters = {"source": source, "after": after, "limit": limit}
        with _mapped("list dead letters"):
            return [DeadLetterRow(*row) for row in self._connection.execute(queues.dlq_list(dlq), parameters)]

    def dead_letter(self, dlq: str, msg_id: int) -> str | None:
        """The whole document as JSON text; None where there is none."""
        with _mapped("show a dead letter"):
            row = self._connection.execute(queues.dlq_show(dlq), {"msg_id": msg_id}).fetchone()
        return None if row is None else str(row[0])

    def redrive(self, dlq: str, source: str, ids: Sequence[int]) -> dict[int, int]:
        """Move these back in one transaction; gives old and new numbers of those that went."""
        with _mapped("redrive"):
            rows = self._connection.execute(queues.dlq_redrive(dlq), {"source": source, "ids": list(ids)}).fetchall()
        return dict(rows)

    def purge_dead_letters(self, dlq: str, source: str, ids: Sequence[int]) -> list[int]:
        """Delete these; gives the numbers of those that went."""
        with _mapped("purge dead letters"):
            rows = self._connection.execute(queues.dlq_purge(dlq), {"source": source, "ids": list(ids)}).fetchall()
        return [row[0] for row in rows]


@contextlib.contextmanager
def _mapped(operation: str) -> Iterator[None]:
    """Turn the driver's errors into ours, with a remedy where there is a usual one."""
    try:
        yield
    except psycopg.Error as error:
        found = translate(error, operation)
        if found.sqlstate == "42501":
            found.remedy = "grant the right to this role, or use one that has it; see `pgmq-supervisor check`"
        raise found from error

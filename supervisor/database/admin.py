"""Administration for the command line: queues, dead letters, sending. Blocking, on one connection in autocommit.

Every method raises a `SupervisorError` that says what to do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from shared.errors import DatabaseError, OperationTimeout, SupervisorError, ValidationError
from shared.naming import validate_queue_name
from shared.pgmq.statements import notifying, queues, server
from supervisor.database.arrays import integers
from supervisor.database.failures import is_of_the_message, translate
from supervisor.embedded.pgmq_install import Installed, install_pgmq

__all__ = [
    "Admin",
    "DeadLetterRow",
    "InitReport",
    "PurgeResult",
    "QueueInfo",
    "RedriveResult",
    "WantedQueue",
]

_BATCH: Final = 100
_PURGE_BATCH: Final = 1000
_CREATE: Final[Mapping[str, bytes]] = {
    "durable": queues.CREATE,
    "unlogged": queues.CREATE_UNLOGGED,
    "partitioned": queues.CREATE_PARTITIONED,
}

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedQueue:
    """A queue that must stand before work begins."""

    name: str
    dead_letter_queue: str
    storage: str = "durable"  # "unlogged", "partitioned"; dead-letter queues are always durable
    create: bool = True
    notify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InitReport:
    """What `init` did."""

    pgmq: Installed
    schema_created: bool
    created: tuple[str, ...]  # queues and dead-letter queues that were not there
    present: tuple[str, ...]
    notify_failed: tuple[tuple[str, str], ...]  # queue, why; they are polled


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInfo:
    """One queue of the database. `in_flight` has what waits for its next attempt, too."""

    name: str
    storage: str
    visible: int
    in_flight: int
    delayed: int
    archived: int
    oldest_visible_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRow:
    """One dead letter in a list. All texts as the document has them; None where it has none."""

    msg_id: int
    reason: str | None
    source_msg_id: str | None
    attempt: str | None
    deaths: str | None
    error_type: str | None
    error_message: str | None
    cause: str | None
    dead_lettered_at: str | None


@dataclass(slots=True)
class RedriveResult:
    """What became of dead letters: (dead letter's number, new number in the source)."""

    moved: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)  # gone, locked, in flight, or no dead letter of this source
    failed: list[tuple[int, str]] = field(default_factory=list)
    more: bool = False  # it was told to end before all that was asked for had its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeResult:
    """What a purge did."""

    deleted: int
    skipped: int  # in flight or locked; for dead letters: those asked for that were not there


def _never() -> bool:
    return False


def _nobody(_: int) -> None:
    """Be the default of who does not want to know."""


class Admin:
    """Uses a connection of its caller's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # --- making ready -------------------------------------------------------------------------------------------------

    def initialise(self, wanted: Sequence[WantedQueue] = ()) -> InitReport:
        """Install PGMQ where it is missing, our schema, and queues. Everything that stands stays as it is."""
        pgmq = install_pgmq(self._connection)
        schema_created = self._create_schema()
        return self._prepare(wanted, pgmq, schema_created=schema_created, may_create=True)

    def prepare(self, wanted: Sequence[WantedQueue]) -> InitReport:
        """Make the queues of a start: those that may be created are, others must stand; also their notifications."""
        return self._prepare(wanted, Installed.ALREADY, schema_created=False, may_create=False)

    def _prepare(
        self, wanted: Sequence[WantedQueue], pgmq: Installed, *, schema_created: bool, may_create: bool
    ) -> InitReport:
        created: list[str] = []
        present: list[str] = []
        failed: list[tuple[str, str]] = []
        for want in wanted:
            for name, storage in ((want.name, want.storage), (want.dead_letter_queue, "durable")):
                if self._exists(name):
                    present.append(name)
                elif want.create or may_create:
                    self.create_queue(name, storage)
                    created.append(name)
                else:
                    raise _no_queue(name)
            if want.notify:
                try:
                    self.enable_notifications(want.name)
                except SupervisorError as error:
                    failed.append((want.name, str(error)))
        return InitReport(
            pgmq=pgmq,
            schema_created=schema_created,
            created=tuple(created),
            present=tuple(present),
            notify_failed=tuple(failed),
        )

    def _create_schema(self) -> bool:
        with _translated("create schema", remedy="run init as a role that may create schemas in this database"):
            if self._value(server.PAUSED_TABLE):
                return False
            with self._connection.transaction():
                self._connection.execute(server.LOCK_SCHEMA)
                self._connection.execute(server.SEE_OTHERS)
                if self._value(server.PAUSED_TABLE):
                    return False
                for statement in server.CREATE_SCHEMA:
                    self._connection.execute(statement)
            return True

    def enable_notifications(self, queue: str) -> None:
        """Make or repair trigger and throttle row; what stands is not touched."""
        with _translated("notify setup"):
            if self._notifications(queue) == (True, True):
                return
            with self._connection.transaction():
                self._connection.execute(queues.SET_LOCK_TIMEOUT, {"timeout_ms": 2000})
                self._connection.execute(notifying.LOCK_QUEUE, {"queue": queue})
                trigger, row = self._notifications(queue)
                parameters = {"queue": queue, "throttle_ms": notifying.THROTTLE_MS}
                if not trigger:
                    self._connection.execute(notifying.ENABLE, parameters)
                elif not row:
                    self._connection.execute(notifying.REPAIR_ROW, parameters)

    def _notifications(self, queue: str) -> tuple[bool, bool]:
        [(_, trigger, row)] = self._rows(notifying.CHECK, {"queue": queue})
        return trigger, row

    # --- queues -------------------------------------------------------------------------------------------------------

    def require_queue(self, queue: str) -> None:
        """Raise unless the queue is there."""
        if not self._exists(queue):
            raise _no_queue(queue)

    def _exists(self, queue: str) -> bool:
        validate_queue_name(queue)
        with _translated("look for queue"):
            self._require_pgmq()
            return bool(self._value(queues.TABLES, {"queue": queue}))

    def _require_pgmq(self) -> None:
        if not self._value(server.HAS_PGMQ):
            raise DatabaseError("PGMQ is not installed in this database", remedy="run `pgmq-supervisor init` once")

    def create_queue(self, queue: str, storage: str = "durable") -> bool:
        """Make a queue; False: it was there."""
        if storage not in _CREATE:
            raise ValidationError(f"storage {storage!r} is none", remedy=f"use one of {', '.join(_CREATE)}")
        if self._exists(queue):
            return False
        remedy = "install the extension pg_partman" if storage == "partitioned" else None
        with _translated(f"create queue {queue}", remedy=remedy):
            self._connection.execute(_CREATE[storage], {"queue": queue})
        return True

    def list_queues(self) -> list[QueueInfo]:
        """Count every queue; those whose name we could not use are left out."""
        found: list[QueueInfo] = []
        with _translated("list queues"):
            self._require_pgmq()
            for name, partitioned, unlogged in self._rows(queues.LIST):
                with contextlib.suppress(ValidationError, psycopg.errors.UndefinedTable):
                    found.append(self._count(name, partitioned=partitioned, unlogged=unlogged))
        return found

    def _count(self, name: str, *, partitioned: bool, unlogged: bool) -> QueueInfo:
        [(visible, in_flight, delayed, oldest_s)] = self._rows(queues.counts(name))
        return QueueInfo(
            name=name,
            storage="partitioned" if partitioned else "unlogged" if unlogged else "durable",
            visible=visible,
            in_flight=in_flight,
            delayed=delayed,
            archived=self._value(queues.count_archived(name)),
            oldest_visible_s=oldest_s,
        )

    def drop_queue(self, queue: str, *, lock_timeout_s: float = 5.0) -> None:
        """Drop a queue with its messages and its archive. Waits for those who use it, at most `lock_timeout_s`."""
        self.require_queue(queue)
        try:
            with _translated(f"drop queue {queue}"), self._connection.transaction():
                self._connection.execute(queues.SET_LOCK_TIMEOUT, {"timeout_ms": round(lock_timeout_s * 1000)})
                self._connection.execute(queues.DROP, {"queue": queue})
        except SupervisorError as error:
            if error.sqlstate != "55P03":
                raise
            raise OperationTimeout(
                f"queue {queue} is in use",
                operation="drop queue",
                sqlstate=error.sqlstate,
                remedy="stop who uses it, and try again",
            ) from error

    def purge_queue(self, queue: str, advanced: Callable[[int], None] = _nobody) -> PurgeResult:
        """Delete every message that is not in flight, in batches; `advanced` hears the number so far."""
        self.require_queue(queue)
        deleted = 0
        with _translated(f"purge queue {queue}"):
            while count := self._value(queues.purge_batch(queue), {"limit": _PURGE_BATCH}):
                deleted += count
                advanced(deleted)
            [(visible, in_flight, delayed, _)] = self._rows(queues.counts(queue))
        return PurgeResult(deleted=deleted, skipped=visible + in_flight + delayed)

    def send_batch(
        self, queue: str, bodies: Sequence[str], *, headers: str | None = None, delay_ms: int = 0
    ) -> list[int]:
        """Send JSON texts, all or none, in order; every message gets these headers. Gives the new numbers.

        After `ConnectionLost` the outcome is unknown: do not send again unseen.
        """
        validate_queue_name(queue)
        if not bodies:
            return []
        every = None if headers is None else [headers] * len(bodies)
        with _translated("send"):
            rows = self._rows(
                queues.SEND_BATCH, {"queue": queue, "bodies": list(bodies), "headers": every, "delay_ms": delay_ms}
            )
        return [msg_id for (msg_id,) in rows]

    # --- dead letters -------------------------------------------------------------------------------------------------

    def dead_letters(
        self, queue: str, dead_letter_queue: str, *, reason: str | None = None, after: int = 0, limit: int = 1000
    ) -> list[DeadLetterRow]:
        """List dead letters of a source, oldest first."""
        self.require_queue(dead_letter_queue)
        parameters = {"source": queue, "reason": reason, "after": after, "limit": limit}
        with _translated("list dead letters"):
            rows = self._rows(queues.dlq_list(dead_letter_queue), parameters)
        return [
            DeadLetterRow(
                msg_id=msg_id,
                reason=why,
                source_msg_id=source_msg_id,
                attempt=attempt,
                deaths=deaths,
                error_type=error_type,
                error_message=error_message,
                cause=cause,
                dead_lettered_at=dead_lettered_at,
            )
            for (
                msg_id,
                why,
                source_msg_id,
                attempt,
                deaths,
                error_type,
                error_message,
                cause,
                dead_lettered_at,
            ) in rows
        ]

    def dead_letter(self, dead_letter_queue: str, msg_id: int) -> str | None:
        """Give one whole document as JSON text, unparsed: no decoder limits depth or digits. None: it is not there."""
        self.require_queue(dead_letter_queue)
        with _translated("show dead letter"):
            rows = self._rows(queues.dlq_show(dead_letter_queue), {"msg_id": msg_id})
        return rows[0][0] if rows else None

    def redrive(
        self,
        queue: str,
        dead_letter_queue: str,
        msg_ids: Sequence[int] | None = None,
        *,
        reason: str | None = None,
        rate: float | None = None,
        advanced: Callable[[int], None] = _nobody,
        sleep: Callable[[float], object] = time.sleep,
        enough: Callable[[], bool] = _never,
    ) -> RedriveResult:
        """Send dead letters back to their source, clean. `msg_ids` None: all that are there now.

        Each goes as a whole or stays. `rate`: at most so many a second. `advanced` hears the number so far. `enough` is
        asked before each batch but the first, and ends it.
        """
        self.require_queue(queue)
        self.require_queue(dead_letter_queue)
        if rate is not None and rate <= 0:
            raise ValidationError("the rate must be above 0", operation="redrive", remedy="leave it out for no limit")
        size = _BATCH if rate is None else max(1, min(_BATCH, int(rate / 4)))
        result = RedriveResult()
        begun_at = time.monotonic()
        tried = 0
        with _translated("redrive"):
            for batch in self._chosen(queue, dead_letter_queue, msg_ids, reason, size):
                if rate is not None and (early_s := begun_at + tried / rate - time.monotonic()) > 0:
                    sleep(early_s)
                if tried and enough():
                    result.more = True
                    break
                self._redrive_batch(queue, dead_letter_queue, batch, result)
                tried += len(batch)
                advanced(len(result.moved))
        return result

    def _redrive_batch(self, queue: str, dead_letter_queue: str, batch: Sequence[int], result: RedriveResult) -> None:
        try:
            rows = self._rows(queues.dlq_redrive(dead_letter_queue), {"source": queue, "ids": integers(batch)})
        except psycopg.Error as error:
            failure = translate(error, "redrive")
            if not is_of_the_message(failure):
                raise
            if len(batch) == 1:
                result.failed.append((batch[0], failure.message))
                return
            middle = len(batch) // 2
            self._redrive_batch(queue, dead_letter_queue, batch[:middle], result)
            self._redrive_batch(queue, dead_letter_queue, batch[middle:], result)
            return
        moved = {old for old, _ in rows}
        result.moved += sorted(rows)
        result.skipped += [msg_id for msg_id in batch if msg_id not in moved]

    def purge_dead_letters(
        self, queue: str, dead_letter_queue: str, msg_ids: Sequence[int] | None = None, *, reason: str | None = None
    ) -> PurgeResult:
        """Delete dead letters for good. `msg_ids` None: all that are there now."""
        self.require_queue(dead_letter_queue)
        deleted = tried = 0
        with _translated("purge dead letters"):
            for batch in self._chosen(queue, dead_letter_queue, msg_ids, reason, _BATCH):
                tried += len(batch)
                rows = self._rows(queues.dlq_purge(dead_letter_queue), {"source": queue, "ids": integers(batch)})
                deleted += len(rows)
        return PurgeResult(deleted=deleted, skipped=tried - deleted)

    def _chosen(
        self, queue: str, dead_letter_queue: str, msg_ids: Sequence[int] | None, reason: str | None, size: int
    ) -> Iterator[Sequence[int]]:
        """Give the numbers to work on, in batches; of all, only what is there now: what dies meanwhile stays."""
        if msg_ids is not None:
            unique = list(dict.fromkeys(msg_ids))
            for start in range(0, len(unique), size):
                yield unique[start : start + size]
            return
        after, upto = 0, self._value(queues.dlq_last(dead_letter_queue)) or 0
        while True:
            parameters = {"source": queue, "reason": reason, "after": after, "upto": upto, "limit": size}
            found = [msg_id for (msg_id,) in self._rows(queues.dlq_ids(dead_letter_queue), parameters)]
            if not found:
                return
            after = found[-1]
            yield found

    # --- statements ---------------------------------------------------------------------------------------------------

    def _rows(self, statement: bytes, parameters: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, parameters).fetchall()

    def _value(self, statement: bytes, parameters: Mapping[str, Any] | None = None) -> Any:
        return self._rows(statement, parameters)[0][0]


def _no_queue(name: str) -> DatabaseError:
    return DatabaseError(f"queue {name} does not exist", remedy=f"pgmq-supervisor queues create {name}")


@contextlib.contextmanager
def _translated(operation: str, *, remedy: str | None = None) -> Iterator[None]:
    """Turn the driver's errors into ours."""
    try:
        yield
    except psycopg.Error as error:
        translated = translate(error, operation)
        if translated.sqlstate == "42501":
            remedy = remedy or "grant this role the right, or use the owner of the queues"
        translated.remedy = translated.remedy or remedy
        raise translated from error

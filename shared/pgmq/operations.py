"""Every operation on queues as a value: what to say, with what, and how to read the answer. No I/O.

Both faces of the client take their methods from here: `blocking` and `aio` carry requests out and add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from shared.durations import parse_delay_ms
from shared.errors import ProtocolError, ValidationError
from shared.pgmq import answers
from shared.pgmq.answers import Rows
from shared.pgmq.arguments import (
    MAX_BATCH,
    Delay,
    Duration,
    Filter,
    checked_delay,
    checked_filter,
    checked_id,
    checked_ids,
    checked_interval,
    checked_quantity,
    checked_queue,
    checked_visibility_s,
)
from shared.pgmq.bodies import MAX_BODY_BYTES, RawJson, encode_body, encode_headers
from shared.pgmq.messages import Message, QueueInfo, QueueMetrics
from shared.pgmq.sqlstate import Moment
from shared.pgmq.statements import client, queues

__all__ = ["Request"]

T = TypeVar("T")
Headers: TypeAlias = Mapping[str, object] | RawJson

_PARTITION_INTERVAL: Final = 10_000
_RETENTION_INTERVAL: Final = 100_000


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One statement: its name for people, its SQL, its parameters, and how its rows become an answer."""

    operation: str
    statement: bytes
    parameters: Mapping[str, object] | None
    decode: Callable[[Rows], T]
    moment: Moment = Moment.WRITE

    def answer(self, rows: Rows) -> T:
        """Read the rows. Raises `ProtocolError` where they are not what this PGMQ should give."""
        try:
            return self.decode(rows)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(
                f"PGMQ's answer is not understood: {error!r}",
                operation=self.operation,
                remedy="compare `capabilities()` with the versions that this client knows",
            ) from error


# --- queues -----------------------------------------------------------------------------------------------------------


def create(queue: str) -> Request[None]:
    """Make a durable queue; nothing happens where it stands."""
    return Request("create", queues.CREATE, {"queue": checked_queue(queue)}, answers.nothing)


def create_unlogged(queue: str) -> Request[None]:
    """Make an unlogged queue: faster, and empty after a crash of the server."""
    return Request("create_unlogged", queues.CREATE_UNLOGGED, {"queue": checked_queue(queue)}, answers.nothing)


def create_partitioned(
    queue: str,
    *,
    partition_interval: int | str = _PARTITION_INTERVAL,
    retention_interval: int | str = _RETENTION_INTERVAL,
    premake: int | None = None,
) -> Request[None]:
    """Make a partitioned queue; needs pg_partman. Intervals are numbers of messages, or times such as "1 day".

    `premake` (partitions made ahead) needs PGMQ 1.13. Raises `UnsupportedError` without pg_partman.
    """
    parameters: dict[str, object] = {
        "queue": checked_queue(queue),
        "partition_interval": checked_interval(partition_interval, "partition_interval"),
        "retention_interval": checked_interval(retention_interval, "retention_interval"),
    }
    if premake is None:
        return Request("create_partitioned", client.CREATE_PARTITIONED, parameters, answers.nothing)
    parameters["premake"] = checked_quantity(premake, "premake")
    return Request("create_partitioned", client.CREATE_PARTITIONED_PREMAKE, parameters, answers.nothing)


def drop(queue: str, *, lock_timeout: Duration = "5s") -> Request[bool]:
    """Drop a queue and its archive; False where there is none. `OperationTimeout` while others hold it locked."""
    parameters = {"queue": checked_queue(queue), "lock_timeout_ms": str(max(1, parse_delay_ms(lock_timeout)))}
    return Request("drop", client.DROP, parameters, answers.first)


def list_queues() -> Request[list[QueueInfo]]:
    """List every queue of the database."""
    return Request("list_queues", client.LIST_QUEUES, None, answers.infos, Moment.READ)


def metrics(queue: str) -> Request[QueueMetrics]:
    """Count the messages of a queue. Reads its whole table: sample slowly."""
    return Request(
        "metrics",
        client.METRICS,
        {"queue": checked_queue(queue)},
        lambda rows: answers.measurements(rows)[0],
        Moment.READ,
    )


def metrics_all() -> Request[list[QueueMetrics]]:
    """Count the messages of every queue."""
    return Request("metrics_all", client.METRICS_ALL, None, answers.measurements, Moment.READ)


def purge_step(queue: str, *, batch: int = 1000) -> Request[int]:
    """Delete up to `batch` messages that are not in flight; the answer tells how many went."""
    parameters = {"limit": checked_quantity(batch, "batch")}
    return Request("purge", queues.purge_batch(checked_queue(queue)), parameters, answers.first)


# --- sending ----------------------------------------------------------------------------------------------------------


def send(queue: str, body: object, *, headers: Headers | None = None, delay: Delay = 0) -> Request[int]:
    """Send one message; gives its id. `delay`: a duration from now, or the time when it becomes visible."""
    checked = checked_delay(delay)
    parameters = {
        "queue": checked_queue(queue),
        "body": encode_body(body),
        "headers": encode_headers(headers),
        **checked.parameters,
    }
    return Request("send", queues.SEND if checked.at is None else client.SEND_AT, parameters, answers.first)


def send_batch(
    queue: str,
    bodies: Iterable[object],
    *,
    headers: Sequence[Headers | None] | None = None,
    delay: Delay = 0,
) -> Request[list[int]]:
    """Send many messages in one statement: all or none. Gives their ids in order. `headers`: as many as bodies."""
    checked = checked_delay(delay)
    texts = [encode_body(body) for body in bodies]
    if not 1 <= len(texts) <= MAX_BATCH:
        raise ValidationError(f"a batch has 1 to {MAX_BATCH} messages, not {len(texts)}", operation="send_batch")
    if sum(map(len, texts)) > MAX_BODY_BYTES:
        raise ValidationError(f"the batch is larger than {MAX_BODY_BYTES} bytes", remedy="split the batch")
    if headers is not None and len(headers) != len(texts):
        raise ValidationError(f"{len(headers)} headers for {len(texts)} bodies", operation="send_batch")
    parameters = {
        "queue": checked_queue(queue),
        "bodies": texts,
        "headers": None if headers is None else [encode_headers(one) for one in headers],
        **checked.parameters,
    }
    return Request(
        "send_batch", queues.SEND_BATCH if checked.at is None else client.SEND_BATCH_AT, parameters, answers.firsts
    )


# --- taking -----------------------------------------------------------------------------------------------------------


def read(
    queue: str, *, visibility_timeout: Duration = 30, quantity: int = 1, where: Filter | None = None
) -> Request[list[Message]]:
    """Take up to `quantity` visible messages, lowest id first, and hide them for a time (whole seconds, rounded up).

    `where`: only messages whose body contains this.
    """
    parameters = {
        "queue": checked_queue(queue),
        "vt_s": checked_visibility_s(visibility_timeout),
        "quantity": checked_quantity(quantity),
        "where": checked_filter(where),
    }
    return Request("read", client.READ, parameters, answers.messages)


def pop(queue: str, *, quantity: int = 1) -> Request[list[Message]]:
    """Take and delete up to `quantity` visible messages: they are gone even if nobody gets to see this answer."""
    parameters = {"queue": checked_queue(queue), "quantity": checked_quantity(quantity)}
    return Request("pop", client.POP, parameters, answers.messages)


def set_vt(queue: str, msg_id: int, delay: Delay) -> Request[Message | None]:
    """Make a message visible after `delay` (or at that time); None where it is gone."""
    checked = checked_delay(delay)
    parameters = {"queue": checked_queue(queue), "msg_id": checked_id(msg_id), **checked.parameters}
    statement = client.SET_VT if checked.at is None else client.SET_VT_AT
    return Request("set_vt", statement, parameters, lambda rows: next(iter(answers.messages(rows)), None))


def set_vt_batch(queue: str, msg_ids: Iterable[int], delay: Delay) -> Request[list[Message]]:
    """Make messages visible after `delay` (or at that time); gives those that are there."""
    checked = checked_delay(delay)
    parameters = {"queue": checked_queue(queue), "msg_ids": checked_ids(msg_ids), **checked.parameters}
    statement = client.SET_VT_BATCH if checked.at is None else client.SET_VT_BATCH_AT
    return Request("set_vt_batch", statement, parameters, answers.messages)


# --- settling ---------------------------------------------------------------------------------------------------------


def archive(queue: str, msg_id: int) -> Request[bool]:
    """Move a message to the archive; False where it is gone. Does not ask who holds it."""
    return Request(
        "archive", client.ARCHIVE, {"queue": checked_queue(queue), "msg_id": checked_id(msg_id)}, answers.first
    )


def archive_batch(queue: str, msg_ids: Iterable[int]) -> Request[list[int]]:
    """Move messages to the archive; gives the ids of those that were there."""
    parameters = {"queue": checked_queue(queue), "msg_ids": checked_ids(msg_ids)}
    return Request("archive_batch", client.ARCHIVE_BATCH, parameters, answers.firsts)


def delete(queue: str, msg_id: int) -> Request[bool]:
    """Delete a message; False where it is gone. Does not ask who holds it."""
    return Request(
        "delete", client.DELETE, {"queue": checked_queue(queue), "msg_id": checked_id(msg_id)}, answers.first
    )


def delete_batch(queue: str, msg_ids: Iterable[int]) -> Request[list[int]]:
    """Delete messages; gives the ids of those that were there."""
    parameters = {"queue": checked_queue(queue), "msg_ids": checked_ids(msg_ids)}
    return Request("delete_batch", client.DELETE_BATCH, parameters, answers.firsts)

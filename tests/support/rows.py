"""A queue under test: sends, claims and settles by the statements of the product, one blocking session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Self

import psycopg

from shared.pgmq.records import ClaimedRow, Fence
from shared.pgmq.statements import claiming, settling
from supervisor.database.arrays import fences, integers

QUEUE = "work"
DEAD = "work_dlq"


class Rows:
    """One queue with its dead-letter queue."""

    def __init__(self, dsn: str, queue: str = QUEUE, *, create: bool = True) -> None:
        self.queue = queue
        self.connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
        if create:
            self.connection.execute("select pgmq.create(%s), pgmq.create(%s)", [queue, f"{queue}_dlq"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    @property
    def deep(self) -> str:
        """JSON nearly as deep as this server can take; far deeper than Python's decoder can."""
        depth = 16_000 if self.connection.info.server_version >= 180000 else 14_000
        return "[" * depth + "]" * depth

    def run(self, statement: bytes, **parameters: Any) -> list[tuple[Any, ...]]:
        """Execute, with results in binary as the product asks for them."""
        cursor = self.connection.cursor(binary=True)
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def ask(self, query: str, *parameters: Any) -> Any:
        """Give the first value of the first row."""
        row = self.connection.execute(query, parameters or None).fetchone()
        return row[0] if row else None

    def send(self, body: Any = None, headers: Any = None, *, delay_s: float = 0.0) -> int:
        """Send one message; `body` and `headers` as Python values."""
        return self.send_text(json.dumps(body), None if headers is None else json.dumps(headers), delay_s=delay_s)

    def send_text(self, body: str | None, headers: str | None = None, *, delay_s: float = 0.0) -> int:
        """Send JSON texts as they are; None is SQL NULL."""
        msg_id = self.ask(
            f"insert into pgmq.q_{self.queue} (vt, message, headers)"
            " values (clock_timestamp() + make_interval(secs => %s), %s::text::jsonb, %s::text::jsonb)"
            " returning msg_id",
            delay_s,
            body,
            headers,
        )
        assert isinstance(msg_id, int)
        return msg_id

    def claim(
        self,
        limit: int = 100,
        *,
        lease_s: float = 30.0,
        budget: int = 64 << 20,
        body_limit: int = claiming.BODY_LIMIT,
        headers_limit: int = claiming.NO_LIMIT,
    ) -> list[ClaimedRow]:
        """Claim messages."""
        found = self.run(
            claiming.claim(self.queue),
            limit=limit,
            lease_ms=round(lease_s * 1000),
            budget=budget,
            body_limit=body_limit,
            headers_limit=headers_limit,
        )
        return [ClaimedRow(Fence(*row[:3]), *row[3:11]) for row in found if row[0] is not None]

    def ack(self, *wanted: Fence, archive: bool = False) -> list[int]:
        """Acknowledge; the ordinals that were served."""
        statement = settling.ack_archive if archive else settling.ack_delete
        return [n for (n,) in self.run(statement(self.queue), **fences(wanted))]

    def retry(self, *wanted: Fence, delay_s: float = 0.0, accounts: str | None = None) -> list[int]:
        """Retry all with the same delay and accounts."""
        return self._keep(settling.retry(self.queue), wanted, delay_s, accounts)

    def release(self, *wanted: Fence, delay_s: float = 0.0, accounts: str | None = None) -> list[int]:
        """Release all with the same accounts."""
        return self._keep(settling.release(self.queue), wanted, delay_s, accounts)

    def _keep(self, statement: bytes, wanted: Sequence[Fence], delay_s: float, accounts: str | None) -> list[int]:
        count = len(wanted)
        rows = self.run(
            statement,
            delays=integers([round(delay_s * 1000)] * count),
            accounts=[accounts] * count,
            **fences(wanted),
        )
        return [n for (n,) in rows if n is not None]

    def dead_letter(self, *wanted: Fence, envelope: str = "{}", target: str | None = None) -> list[int]:
        """Move all with the same envelope."""
        rows = self.run(
            settling.dead_letter(self.queue),
            target=target or f"{self.queue}_dlq",
            envelopes=[envelope] * len(wanted),
            **fences(wanted),
        )
        return [n for (n,) in rows]

    def renew(self, *wanted: Fence, lease_s: float = 60.0) -> dict[int, float]:
        """Renew; ordinal to the new lease, -1 where busy."""
        return dict(self.run(settling.renew(self.queue), lease_ms=round(lease_s * 1000), **fences(wanted)))  # type: ignore[arg-type]

    def expire(self, msg_id: int) -> None:
        """Let a lease run out without touching anything else."""
        self.connection.execute(
            f"update pgmq.q_{self.queue} set vt = clock_timestamp() - interval '1 ms' where msg_id = %s", [msg_id]
        )

    def count(self, queue: str | None = None) -> int:
        """Count the live messages of this queue, or of another one."""
        found = self.ask(f"select count(*) from pgmq.q_{queue or self.queue}")
        assert isinstance(found, int)
        return found

    def headers(self, msg_id: int) -> Any:
        """Give the headers of a message as a Python value."""
        return self.ask(f"select headers from pgmq.q_{self.queue} where msg_id = %s", msg_id)


def accounts(queue: str, msg_id: int, **values: int) -> str:
    """Write an entry as the core does."""
    return json.dumps({"queue": queue, "msg_id": msg_id, **values})

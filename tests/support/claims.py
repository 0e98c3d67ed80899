"""A claim inside a transaction, as a transactional child makes it, for tests that play the child."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

from shared.pgmq.statements import transactions
from supervisor.core.types import TxIdentity


class TxClaim(NamedTuple):
    """What `claim_one` tells."""

    msg_id: int
    read_ct: int
    read_us: int
    enqueued_us: int
    visible_us: int
    accounts: str | None
    place: str
    xid: int
    backend_pid: int
    backend_start_us: int
    touched: bool

    @property
    def identity(self) -> TxIdentity:
        """The transaction."""
        return TxIdentity(self.xid, self.backend_pid, self.backend_start_us)

    @property
    def settled_by(self) -> dict[str, Any]:
        """What every settlement inside the transaction is given."""
        return {"place": self.place, "msg_id": self.msg_id, "xid": self.xid}


def claim_in(connection: psycopg.Connection[Any], queue: str, *, lease_ms: int = 30_000) -> TxClaim | None:
    """Claim one message in the open transaction of a connection."""
    statement = transactions.claim_one(queue, pooled=True)
    row = connection.execute(statement, {"lease_ms": lease_ms, "limit_ms": "0"}).fetchone()
    return None if row is None else TxClaim(*row[: len(TxClaim._fields)])


def claimed_in(connection: psycopg.Connection[Any], queue: str, **options: Any) -> TxClaim:
    """The same where there is one."""
    claim = claim_in(connection, queue, **options)
    assert claim is not None
    return claim

"""What a child says inside its transaction besides the claim and its end: limits, and whether the claim stands."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from shared.pgmq.statements._compose import compose, live, micros

__all__ = ["LIMIT", "SAVEPOINT", "claim_stands"]

LIMIT: Final = b"select set_config(n, v, true) from unnest(%(names)s::text[], %(values)s::text[]) as s(n, v)"
"""Set settings until the end of the transaction, which is what a pooler allows. Parameters: names, values.

Raises for a setting that the server does not know or its platform cannot. Locks nothing.
"""

SAVEPOINT: Final = "pgmq_supervisor_handler"
"""Stands between the claim and the handler's work: back to it for a retry or a dead letter."""


@lru_cache(maxsize=64)
def claim_stands(queue: str) -> bytes:
    """Compose the look at what was claimed in this transaction. Parameter: msg_id.

    One row: (transaction number or NULL, read_ct or NULL where the row is gone, vt in microseconds or NULL). Locks
    nothing: the row is locked by this transaction as long as the number is the one of the claim.
    """
    return compose(
        """
        select pg_current_xact_id_if_assigned()::text::bigint, m.read_ct, {visible_us}
        from (values (%(msg_id)s::bigint)) as w(msg_id) left join {q} as m using (msg_id)
        """,
        q=live(queue),
        visible_us=micros("m.vt"),
    )

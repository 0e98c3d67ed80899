"""What a child says inside its transaction besides the claim and its end: limits, and whether the claim stands."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from psycopg import sql

from shared.pgmq.statements._compose import compose, live, micros

__all__ = ["SAVEPOINT", "claim_stands", "limits"]

SAVEPOINT: Final = "pgmq_supervisor_handler"
"""Stands between the claim and the handler's work: back to it for a retry or a dead letter."""


@lru_cache(maxsize=64)
def limits(settings: tuple[tuple[str, str], ...]) -> bytes:
    """Compose the setting of names to values until the end of the transaction, which is what a pooler allows.

    Raises for a setting that the server does not know or its platform cannot. Locks nothing.
    """
    calls = [
        sql.SQL("set_config({}, {}, true)").format(sql.Literal(name), sql.Literal(value)) for name, value in settings
    ]
    return sql.SQL("select {}").format(sql.SQL(", ").join(calls)).as_bytes(None)


@lru_cache(maxsize=64)
def claim_stands(queue: str) -> bytes:
    """Compose the look at what was claimed in this transaction. Parameters: msg_id, timeout_ms (as text).

    One row: (transaction number or NULL, read_ct or NULL where the row is gone, vt in microseconds or NULL). What
    follows in this transaction is bounded by the timeout. Locks nothing: the row is locked by this transaction as long
    as the number is the one of the claim.
    """
    return compose(
        """
        select pg_current_xact_id_if_assigned()::text::bigint, m.read_ct, {visible_us},
               set_config('statement_timeout', %(timeout_ms)s::text, true)
        from (values (%(msg_id)s::bigint)) as w(msg_id) left join {q} as m using (msg_id)
        """,
        q=live(queue),
        visible_us=micros("m.vt"),
    )

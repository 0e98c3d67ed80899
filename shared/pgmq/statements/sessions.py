"""What a child says inside its transaction besides the claim and its end: limits, and whether the claim stands."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from psycopg import sql

from shared.pgmq.statements._compose import compose, live, micros, piece

__all__ = [
    "INDEXES_ONLY",
    "KEEPALIVE",
    "NOTICE_ITS_END",
    "PREPARED_BODY",
    "PREPARED_CLAIM",
    "SAVEPOINT",
    "SESSION",
    "SESSION_START",
]
__all__ += ["claim_stands", "limits"]

SAVEPOINT: Final = "pgmq_supervisor_handler"
"""Stands between the claim and the handler's work: back to it for a retry or a dead letter."""

PREPARED_CLAIM: Final = "pgmq_supervisor_claim"
PREPARED_BODY: Final = "pgmq_supervisor_body"
"""Names of prepared statements, where no pooler stands between."""

SESSION_START: Final = piece(
    "select {start} from pg_stat_get_activity(pg_backend_pid()) as a", start=micros("a.backend_start")
)

SESSION: Final = compose("select pg_backend_pid(), ({start}), current_setting('enable_seqscan')", start=SESSION_START)
"""Which session this is: pid, start in microseconds, and whether its plans may read tables whole. Locks nothing."""

INDEXES_ONLY: Final = (("enable_seqscan", "off"),)
"""For prepared claims: a plan may be one for the empty queue, where reading the table whole seemed cheapest."""

KEEPALIVE: Final = (("tcp_keepalives_idle", "10"), ("tcp_keepalives_interval", "5"), ("tcp_keepalives_count", "3"))
"""The server's side of a connection whose client's host is gone."""

NOTICE_ITS_END: Final = (("client_connection_check_interval", "500"),)
"""Inside a query the server looks whether its client is still there. Not on every platform."""


@lru_cache(maxsize=64)
def limits(settings: tuple[tuple[str, str], ...], *, local: bool) -> bytes:
    """Compose the setting of names to values, until the end of the transaction or of the session.

    Raises for a setting that the server does not know or its platform cannot. Locks nothing.
    """
    calls = [
        piece(
            "set_config({name}, {value}, {local})", name=sql.Literal(n), value=sql.Literal(v), local=sql.Literal(local)
        )
        for n, v in settings
    ]
    return compose("select {calls}", calls=sql.SQL(", ").join(calls))


@lru_cache(maxsize=64)
def claim_stands(queue: str) -> bytes:
    """Compose the look at what was claimed in this transaction. Parameters: msg_id, timeout_ms (as text).

    One row: (transaction number or NULL, place of the row or NULL where it is gone). What follows in this transaction
    is bounded by the timeout. Locks nothing: the row is locked by this transaction as long as the number is the one of
    the claim.
    """
    return compose(
        """
        select pg_current_xact_id_if_assigned()::text::bigint, m.ctid::text,
               set_config('statement_timeout', %(timeout_ms)s::text, true)
        from (values (%(msg_id)s::bigint)) as w(msg_id) left join {q} as m using (msg_id)
        """,
        q=live(queue),
    )

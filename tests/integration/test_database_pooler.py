"""Behind PgBouncer in transaction mode: every command works, notifications are found out not to, and polled instead."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from shared.pgmq.records import (
    Ack,
    AckMode,
    DeadLetter,
    Reckoning,
    ReckonOutcome,
    Release,
    RenewOutcome,
    Retry,
    SettleOutcome,
)
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.types import ClaimId
from supervisor.telemetry.facts import NotifySetupFailed
from tests.support.pooler import transaction_pooler
from tests.support.rows import DEAD, QUEUE, Rows, accounts
from tests.support.shell import DELETE, NAME, running


@pytest.fixture
def pooled(database: str) -> Iterator[str]:
    """Give the DSN of the same database through a pooler with two sessions."""
    with transaction_pooler(database) as dsn:
        yield dsn


async def test_every_command_works_behind_a_transaction_pooler(database: str, pooled: str) -> None:
    """Nothing depends on the state of a session, and refused start-up parameters are left out."""
    with Rows(database) as rows:
        for n in range(6):
            rows.send("x" * 100 * n)
        async with running(pooled) as shell:
            owned = (await shell.claim(budget=150)).rows
            assert len(owned) == 6
            shell.database.fetch_body(c.FetchBody(NAME, ClaimId(1), owned[5].fence))
            assert (await shell.events.next(e.BodyFetched)).body == b'"' + b"x" * 500 + b'"'
            shell.renew(*(row.fence for row in owned))
            renewed = await shell.events.next(e.Renewed)
            assert {result.outcome for result in renewed.results} == {RenewOutcome.DONE}
            results = await shell.settle(
                (owned[0].fence, DELETE),
                (owned[1].fence, Ack(AckMode.ARCHIVE)),
                (owned[2].fence, Retry(0, accounts(QUEUE, owned[2].fence.msg_id, deaths=1))),
                (owned[3].fence, Release(None)),
                (owned[4].fence, DeadLetter(DEAD, '{"version": 1}')),
            )
            assert {result.outcome for result in results} == {SettleOutcome.DONE}
            reckoning = Reckoning(owned[3].fence.msg_id, 1, Retry(0, None))
            shell.database.reckon(c.Reckon(NAME, ClaimId(1), reckoning, None))
            assert (await shell.events.next(e.Reckoned)).outcome is ReckonOutcome.DONE
            assert await shell.database.ping()
        # No limit of ours stuck to the sessions that others share.
        with psycopg.connect(pooled, autocommit=True) as other:
            assert other.execute("show statement_timeout").fetchone() == ("0",)


async def test_a_pooler_on_the_listening_connection_is_found_out(database: str, pooled: str) -> None:
    """LISTEN succeeds there and nothing ever comes: told once, loudly, and left to polling."""
    with Rows(database):
        async with running(pooled, notify=True, probe_s=0.5, heartbeat_s=0.5) as shell:
            down = await shell.events.next(e.ListenerDown)
            assert "pooler" in down.error
            failed = await shell.facts.next(NotifySetupFailed)
            assert "listen_dsn" in failed.error
            shell.events.all.clear()
            assert (await shell.claim()).rows == ()


async def test_a_direct_listening_dsn_beside_a_pooler_works(database: str, pooled: str) -> None:
    """Producers and probe go through the pooler, LISTEN does not."""
    with Rows(database) as rows:
        rows.connection.execute("select pgmq.enable_notify_insert(%s, 0)", [QUEUE])
        async with running(pooled, listen_dsn=database, notify=True, probe_s=0.3, heartbeat_s=0.2) as shell:
            await shell.events.next(e.ListenerUp)
            with psycopg.connect(pooled, autocommit=True) as producer:
                producer.execute("select pgmq.send(%s, '1')", [QUEUE])
            await shell.events.next(e.Notified)
            assert not any(isinstance(event, e.ListenerDown) for event in shell.events.all)

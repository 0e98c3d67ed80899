"""The client behind PgBouncer in transaction mode, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.errors import OperationTimeout
from tests.support.clients import FACES, open_client
from tests.support.pooler import transaction_pooler


@pytest.fixture(params=FACES)
async def client(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Any]:
    """Give a client with more connections than the pooler has sessions."""
    with transaction_pooler(database) as dsn:
        async with open_client(request.param, dsn, pool_size=6) as made:
            yield made


async def test_everything_works_without_startup_options(client: Any) -> None:
    """The pooler refuses `options`; the client goes on without them, and nothing lives in a session."""
    await client.create("orders")
    ids = await asyncio.gather(*(client.send("orders", n) for n in range(12)))
    assert len(set(ids)) == 12
    async with client.transaction() as tx:
        taken = await tx.read("orders", quantity=5)
        assert await tx.delete_batch("orders", [message.msg_id for message in taken]) == [m.msg_id for m in taken]
        await tx.commit()
    assert (await client.metrics("orders")).length == 7
    assert await client.purge("orders") == 7
    assert (await client.capabilities()).has_pgmq


async def test_limits_are_set_within_a_transaction(client: Any) -> None:
    """Where there are no start-up options, `set local` does it."""
    async with client.transaction() as tx:
        await tx.execute("set local statement_timeout = '50ms'")
        with pytest.raises(OperationTimeout, match="was not done"):
            await tx.execute("select pg_sleep(30)")
    async with client.transaction() as tx:
        assert (await tx.execute("show statement_timeout")).value() == "0"

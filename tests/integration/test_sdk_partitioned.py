"""The client: partitioned queues, where the server has pg_partman; elsewhere these are not run, and say so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from shared.errors import DatabaseError, UnsupportedError
from tests.support.clients import FACES, open_client


@pytest.fixture
def partman(database: str) -> str:
    """Give a database with pg_partman in it."""
    with psycopg.connect(database, autocommit=True) as connection:
        available = connection.execute("select 1 from pg_available_extensions where name = 'pg_partman'").fetchone()
        if available is None:
            pytest.skip("not run: this server has no pg_partman")
        connection.execute("create extension pg_partman")
    return database


@pytest.fixture(params=FACES)
async def client(request: pytest.FixtureRequest, partman: str) -> AsyncIterator[Any]:
    """Give a client of a database with pg_partman."""
    async with open_client(request.param, partman) as made:
        yield made


async def test_a_partitioned_queue_works_like_any_other(client: Any) -> None:
    """Made, listed, sent to, read, archived, purged, measured and dropped."""
    await client.create_partitioned("events", partition_interval=10, retention_interval=100)
    assert [(queue.name, queue.partitioned) for queue in await client.list_queues()] == [("events", True)]
    ids = await client.send_batch("events", [{"n": n} for n in range(25)])
    first, second, *_ = await client.read("events", quantity=2)
    assert (first.msg_id, first.body) == (ids[0], {"n": 0})
    assert await client.archive("events", first.msg_id) is True
    assert await client.delete("events", second.msg_id) is True
    assert (await client.set_vt("events", ids[2], "1h")).msg_id == ids[2]
    assert (await client.metrics("events")).length == 23
    assert len(await client.pop("events", quantity=3)) == 3
    # Delayed but never read: it is not in flight.
    assert await client.purge("events", batch=7) == 20
    assert await client.drop("events") is True
    assert await client.list_queues() == []


async def test_partitions_by_time_are_possible(client: Any) -> None:
    """An interval that is a time partitions by the time of sending."""
    await client.create_partitioned("events", partition_interval="1 day", retention_interval="7 days")
    await client.send("events", 1)
    assert [message.body for message in await client.pop("events")] == [1]


async def test_premake_needs_a_pgmq_that_takes_it(client: Any) -> None:
    """Older versions are told apart by the signature; the error is UnsupportedError."""
    if (await client.capabilities()).takes("create_partitioned", "text", "text", "text", "integer"):
        await client.create_partitioned("events", partition_interval=10, retention_interval=100, premake=1)
        assert (await client.metrics("events")).default_partition_length == 0
    else:
        with pytest.raises(UnsupportedError):
            await client.create_partitioned("events", premake=1)
        await client.create_partitioned("events")
        assert (await client.metrics("events")).default_partition_length is None


async def test_partition_maintenance_that_fails_is_passed_on(client: Any) -> None:
    """Failure model: partition maintenance fails. What the server says reaches the caller."""
    with pytest.raises(DatabaseError) as caught:
        await client.create_partitioned("events", partition_interval="soon")
    assert caught.value.operation == "create_partitioned"
    assert await client.list_queues() == []


@pytest.mark.parametrize("face", FACES)
async def test_without_partman_it_is_unsupported(face: str, database: str) -> None:
    """The error names the extension and how to get it."""
    async with open_client(face, database) as client:
        with pytest.raises(UnsupportedError, match="pg_partman") as caught:
            await client.create_partitioned("events")
        assert caught.value.remedy

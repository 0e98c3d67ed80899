"""The client: operations on queues, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from shared.errors import DatabaseError, OperationTimeout, ProtocolError, UnsupportedError, ValidationError
from shared.pgmq.bodies import RawJson
from tests.support.clients import FACES, open_client


@pytest.fixture(params=FACES)
async def client(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Any]:
    """Give a client with the queue `orders`."""
    async with open_client(request.param, database, pool_size=2) as made:
        await made.create("orders")
        yield made


def execute(dsn: str, query: str) -> list[Any]:
    """Run one statement beside the client."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(query)
        return cursor.fetchall() if cursor.description else []


async def test_queues_are_made_listed_and_dropped(client: Any) -> None:
    """Making one that stands changes nothing; dropping one that is gone says so."""
    await client.create("orders")
    await client.create_unlogged("scratch")
    found = {queue.name: queue for queue in await client.list_queues()}
    assert set(found) == {"orders", "scratch"}
    assert (found["orders"].unlogged, found["scratch"].unlogged) == (False, True)
    assert found["orders"].created_at <= datetime.now(UTC) + timedelta(minutes=1)
    assert await client.drop("scratch") is True
    assert await client.drop("scratch") is False
    assert [queue.name for queue in await client.list_queues()] == ["orders"]


@pytest.mark.parametrize("body", [{"a": [1, 2.5, None, "ü"]}, [], "text", 7, 1.5, True, None])
async def test_python_values_arrive_as_they_were_sent(client: Any, body: Any) -> None:
    """A body is any JSON value, also null."""
    sent = await client.send("orders", body)
    (message,) = await client.read("orders")
    assert (message.msg_id, message.body, message.read_ct, message.headers) == (sent, body, 1, None)
    assert message.last_read_at is not None
    assert message.enqueued_at <= message.last_read_at < message.vt


async def test_raw_json_passes_through_unparsed(client: Any) -> None:
    """Numbers that Python would round or refuse arrive digit by digit, as text or as bytes."""
    digits = "1" * 5000
    await client.send("orders", RawJson(f'{{"n": {digits}}}'))
    await client.send("orders", RawJson(b"[1.50]"))
    big, small = await client.read("orders", quantity=2)
    assert big.raw == f'{{"n": {digits}}}'
    assert small.raw == "[1.50]"
    with pytest.raises(ProtocolError, match="raw text"):
        _ = big.body


async def test_a_message_that_python_cannot_read_does_not_spoil_the_batch(client: Any) -> None:
    """Deep nesting and SQL NULL arrive as raw text beside others."""
    await client.send("orders", RawJson("[" * 5000 + "]" * 5000))
    await client.send("orders", {"fine": 1})
    deep, fine = await client.read("orders", quantity=5)
    assert fine.body == {"fine": 1}
    with pytest.raises(ProtocolError):
        _ = deep.body
    assert deep.raw.count("[") == 5000


async def test_null_rows_and_infinite_times_have_values(client: Any, database: str) -> None:
    """SQL NULL is None; 'infinity' is the end of datetime."""
    execute(database, "insert into pgmq.q_orders (vt, message) values ('-infinity', null)")
    (message,) = await client.pop("orders")
    assert (message.raw, message.body, message.headers) == (None, None, None)
    assert message.vt == datetime.min.replace(tzinfo=UTC)
    sent = await client.send("orders", 1)
    moved = await client.set_vt("orders", sent, datetime.max.replace(tzinfo=UTC))
    assert moved.vt == datetime.max.replace(tzinfo=UTC)


async def test_headers_come_back(client: Any) -> None:
    """A mapping or raw JSON beside the body."""
    await client.send("orders", 1, headers={"trace": "abc"})
    await client.send("orders", 2, headers=RawJson('{"n": 1}'))
    assert [message.headers for message in await client.read("orders", quantity=2)] == [{"trace": "abc"}, {"n": 1}]


async def test_a_batch_is_sent_in_order_and_as_a_whole(client: Any) -> None:
    """Ids come in the order of the bodies, headers belong to their bodies, and one bad body keeps all back."""
    ids = await client.send_batch("orders", [{"n": n} for n in range(5)], headers=[{"h": n} for n in range(5)])
    messages = await client.read("orders", quantity=10)
    assert [message.msg_id for message in messages] == ids == sorted(ids)
    assert [(message.body["n"], message.headers["h"]) for message in messages] == [(n, n) for n in range(5)]
    with pytest.raises(DatabaseError) as caught:
        await client.send_batch("orders", [1, RawJson("{broken")])
    assert (caught.value.sqlstate, caught.value.retryable) == ("22P02", False)
    assert (await client.metrics("orders")).length == 5


async def test_a_batch_may_mix_messages_with_and_without_headers(client: Any) -> None:
    """None stands for no headers."""
    await client.send_batch("orders", [1, 2], headers=[None, {"h": 1}])
    assert [message.headers for message in await client.pop("orders", quantity=2)] == [None, {"h": 1}]


@pytest.mark.parametrize("delay", ["1h", 3600, timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)])
async def test_a_delayed_message_is_not_visible_yet(client: Any, delay: Any) -> None:
    """A duration or a point in time; the same for one and for many."""
    sent = await client.send("orders", 1, delay=delay)
    (many,) = await client.send_batch("orders", [2], delay=delay)
    assert await client.read("orders") == []
    expected = delay if isinstance(delay, datetime) else datetime.now(UTC) + timedelta(hours=1)
    for msg_id in (sent, many):
        vt = (await client.set_vt("orders", msg_id, delay)).vt
        assert abs(vt - expected) < timedelta(minutes=5)


async def test_delays_are_exact_to_the_millisecond(client: Any, database: str) -> None:
    """The database adds the duration; nothing is rounded to seconds."""
    await client.send("orders", 1, delay="1500ms")
    ((late,),) = execute(database, "select (extract(epoch from vt - enqueued_at) * 1000)::integer from pgmq.q_orders")
    assert 1500 <= late < 2000


async def test_the_longest_delay_works(client: Any) -> None:
    """9,007,199,254,740 ms is accepted by the database too."""
    sent = await client.send("orders", 1, delay=timedelta(milliseconds=9_007_199_254_740))
    assert (await client.set_vt("orders", sent, 0)).vt.year >= datetime.now(UTC).year


async def test_reading_hides_for_the_visibility_timeout(client: Any) -> None:
    """Whole seconds, rounded up; with none the message stays visible."""
    await client.send("orders", 1)
    (message,) = await client.read("orders", visibility_timeout="10500ms")
    assert message.vt - message.last_read_at == pytest.approx(timedelta(seconds=11), abs=timedelta(seconds=0.5))
    assert await client.read("orders") == []
    await client.set_vt("orders", message.msg_id, 0)
    (again,) = await client.read("orders", visibility_timeout=0)
    assert again.read_ct == 2
    assert len(await client.read("orders")) == 1


async def test_a_filter_takes_only_what_matches(client: Any) -> None:
    """`where` is containment in the body."""
    await client.send_batch("orders", [{"kind": "a"}, {"kind": "b"}])
    assert [message.body for message in await client.read("orders", quantity=9, where={"kind": "b"})] == [{"kind": "b"}]


async def test_messages_are_settled_one_by_one_and_many_at_once(client: Any) -> None:
    """Delete, archive and set_vt tell what was there and what was not."""
    first, second, third, fourth, fifth = await client.send_batch("orders", range(5))
    assert await client.delete("orders", first) is True
    assert await client.delete("orders", first) is False
    assert await client.archive("orders", second) is True
    assert await client.archive("orders", second) is False
    assert await client.set_vt("orders", first, 5) is None
    assert [m.msg_id for m in await client.set_vt_batch("orders", [first, third, fourth], "1h")] == [third, fourth]
    assert await client.delete_batch("orders", [first, third]) == [third]
    assert sorted(await client.archive_batch("orders", [third, fourth, fifth])) == [fourth, fifth]
    assert await client.delete_batch("orders", []) == []


async def test_pop_takes_for_good(client: Any) -> None:
    """What was popped is gone; an empty queue gives nothing."""
    await client.send_batch("orders", ["a", "b", "c"])
    assert [message.body for message in await client.pop("orders")] == ["a"]
    assert [message.body for message in await client.pop("orders", quantity=9)] == ["b", "c"]
    assert await client.pop("orders") == []


async def test_purge_leaves_what_is_in_flight(client: Any) -> None:
    """Deleted batch by batch; a message that somebody holds stays."""
    await client.send_batch("orders", range(25))
    (held,) = await client.read("orders")
    assert await client.purge("orders", batch=10) == 24
    assert await client.delete("orders", held.msg_id) is True


async def test_metrics_count(client: Any) -> None:
    """Length, visible length, total, ages; None for ages of an empty queue."""
    await client.create("empty")
    await client.send_batch("orders", range(3))
    await client.send("orders", 4, delay="1h")
    found = await client.metrics("orders")
    assert (found.queue, found.length, found.visible_length, found.total_messages) == ("orders", 4, 3, 4)
    assert found.default_partition_length is None
    everything = {one.queue: one for one in await client.metrics_all()}
    assert (everything["empty"].length, everything["empty"].oldest_age_s) == (0, None)
    assert everything["orders"].oldest_age_s >= 0


async def test_a_long_poll_finds_what_comes_later(client: Any) -> None:
    """It waits without a connection: the pool of two is free meanwhile."""
    await client.send("orders", 1, delay="300ms")
    (message,) = await client.read_with_poll("orders", max_wait="30s", interval="20ms", visibility_timeout=60)
    assert message.body == 1


async def test_a_long_poll_ends_empty(client: Any) -> None:
    """After max_wait there is an empty list; max_wait 0 looks once."""
    assert await client.read_with_poll("orders", max_wait="100ms", interval="10ms") == []
    assert await client.read_with_poll("orders", max_wait=0) == []


async def test_dropping_waits_no_longer_than_asked(client: Any, database: str) -> None:
    """A queue that somebody has locked is not waited for without end."""
    with psycopg.connect(database) as other:
        other.execute("select * from pgmq.q_orders")
        with pytest.raises(OperationTimeout) as caught:
            await client.drop("orders", lock_timeout="50ms")
    assert (caught.value.sqlstate, caught.value.retryable) == ("55P03", True)
    assert await client.drop("orders") is True


async def test_a_missing_queue_is_named_with_a_remedy(client: Any) -> None:
    """The error has category, SQLSTATE, operation and remedy."""
    with pytest.raises(DatabaseError, match="q_nowhere") as caught:
        await client.send("nowhere", 1)
    error = caught.value
    assert (error.operation, error.sqlstate, error.retryable) == ("send", "42P01", False)
    assert error.remedy
    assert "pgmq.send" in (error.detail or "")


@pytest.mark.parametrize("face", FACES)
async def test_a_database_without_pgmq_is_unsupported(face: str, bare_database: str) -> None:
    """The remedy says how to install it."""
    async with open_client(face, bare_database) as client:
        with pytest.raises(UnsupportedError, match="pgmq") as caught:
            await client.send("orders", 1)
        assert caught.value.remedy
        assert not (await client.capabilities()).has_pgmq


async def test_nothing_is_sent_for_a_bad_argument(client: Any, database: str) -> None:
    """Validation comes before any SQL, so before any connection."""
    bad: list[Any] = [
        lambda: client.send("Orders", 1),
        lambda: client.send("orders", float("nan")),
        lambda: client.send("orders", {"a": "\ud800"}),
        lambda: client.send("orders", 1, delay=-1),
        lambda: client.send("orders", 1, delay=timedelta(milliseconds=9_007_199_254_741)),
        lambda: client.send("orders", 1, delay=datetime(2030, 1, 1)),  # noqa: DTZ001 - what is refused
        lambda: client.send("orders", 1, headers=[1]),
        lambda: client.send_batch("orders", []),
        lambda: client.send_batch("orders", [1], headers=[]),
        lambda: client.read("orders", visibility_timeout=2**31),
        lambda: client.read("orders", quantity=0),
        lambda: client.delete("orders", 2**63),
        lambda: client.archive_batch("orders", ["1"]),
        lambda: client.create_partitioned("orders", partition_interval=0),
    ]
    for call in bad:
        with pytest.raises(ValidationError):
            await call()
    assert execute(database, "select count(*) from pgmq.q_orders") == [(0,)]


async def test_twenty_clients_start_at_once(client: Any, database: str, request: pytest.FixtureRequest) -> None:
    """All make the same queue and send: nobody fails, nothing is missing."""
    face = request.node.callspec.params["client"]

    async def start(number: int) -> int:
        async with open_client(face, database, pool_size=1) as one:
            await one.create("shared")
            sent: int = await one.send("shared", number)
            return sent

    ids = await asyncio.gather(*(start(number) for number in range(20)))
    assert sorted(ids) == list(range(1, 21))
    assert {message.body for message in await client.pop("shared", quantity=30)} == set(range(20))

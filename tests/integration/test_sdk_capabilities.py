"""The client: what server and PGMQ can do, from the catalogs."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from shared.errors import ProtocolError, UnsupportedError
from tests.support.clients import FACES, open_client
from tests.support.proxy import Proxy


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    """Name a face of the client."""
    name: str = request.param
    return name


async def test_versions_signatures_and_fields_are_read(face: str, database: str) -> None:
    """Every overload of send with exact types, and the fields of what functions give."""
    async with open_client(face, database) as client:
        found = await client.capabilities()
    with psycopg.connect(database) as connection:
        assert found.server_version_num == connection.info.server_version
    assert found.has_pgmq
    assert len(found.overloads("send")) >= 6
    assert found.takes("send", "text", "jsonb", "jsonb", "timestamp with time zone")
    assert found.takes("read", "text", "integer", "integer")
    assert found.takes("pop", "text")
    assert not found.takes("send", "text")
    assert not found.takes("send", "text", "text")
    fields = [field.name for field in found.overloads("read")[0].fields]
    assert fields == ["msg_id", "read_ct", "enqueued_at", "last_read_at", "vt", "message", "headers"]
    assert found.gives("metrics", "queue_visible_length")
    signatures = {function.signature for function in found.overloads("pop")}
    assert signatures == {"pop(queue_name text, qty integer?) -> SETOF pgmq.message_record"}


async def test_what_older_versions_lack_is_seen(face: str, database: str) -> None:
    """`premake` and default_partition_length came together; a function that is gone is missing here too."""
    async with open_client(face, database) as client:
        found = await client.capabilities()
        premake = found.takes("create_partitioned", "text", "text", "text", "integer")
        assert premake == found.gives("metrics", "default_partition_length")
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("drop function pgmq.pop(text, integer)")
        assert found.overloads("pop")
        assert not (await client.capabilities(refresh=True)).overloads("pop")


async def test_the_catalogs_are_asked_once(face: str, database: str, proxy: Proxy) -> None:
    """The answer is remembered until it is asked for anew."""
    async with open_client(face, proxy.dsn) as client:
        first = await client.capabilities()
        assert await client.capabilities() is first
        assert len(proxy.statements("pg_proc")) == 1
        assert await client.capabilities(refresh=True) == first
        assert len(proxy.statements("pg_proc")) == 2


async def test_a_server_without_pgmq_is_described_too(face: str, bare_database: str) -> None:
    """No functions, no version, no error."""
    async with open_client(face, bare_database) as client:
        found = await client.capabilities()
    assert (found.has_pgmq, found.functions, found.pgmq_version) == (False, (), None)


async def test_a_function_that_pgmq_lacks_is_unsupported(face: str, database: str) -> None:
    """An operation on a PGMQ without its function says so; nothing else breaks."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("drop function pgmq.pop(text, integer)")
    async with open_client(face, database) as client:
        await client.create("orders")
        with pytest.raises(UnsupportedError, match=r"pgmq\.pop") as caught:
            await client.pop("orders")
        assert (caught.value.sqlstate, caught.value.category) == ("42883", "unsupported")
        assert await client.send("orders", 1) == 1


async def test_a_changed_answer_is_a_protocol_error(face: str, database: str) -> None:
    """A PGMQ whose metrics have other fields is not misread."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("drop type pgmq.metrics_result cascade")
        connection.execute(
            "create function pgmq.metrics(queue_name text) returns table (queue text)"
            " language sql as 'select queue_name'"
        )
    async with open_client(face, database) as client:
        with pytest.raises(ProtocolError, match="not understood") as caught:
            await client.metrics("orders")
        assert caught.value.operation == "metrics"


async def test_the_same_values_stand_behind_both_faces(database: str) -> None:
    """One decoding."""
    answers: list[Any] = []
    for face in FACES:
        async with open_client(face, database) as client:
            answers.append(await client.capabilities())
    assert answers[0] == answers[1]

"""Partitioned queues: no unique number, places that repeat between partitions. Needs a server with pg_partman."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shared.pgmq.statements import queues, transactions
from supervisor.database.admin import Admin
from tests.support.claims import claimed_in
from tests.support.rows import QUEUE, Rows, accounts

ENVELOPE = json.dumps({"version": 1, "source": {"queue": QUEUE}})


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a partitioned queue whose partitions hold ten messages each."""
    with Rows(database, create=False) as found:
        if not found.ask("select count(*) from pg_available_extensions where name = 'pg_partman'"):
            pytest.skip("this server has no pg_partman")
        found.connection.execute("create extension pg_partman")
        found.connection.execute("select pgmq.create_partitioned(%s, '10', '1000')", [QUEUE])
        found.connection.execute("select pgmq.create(%s)", [f"{QUEUE}_dlq"])
        yield found


def test_each_row_is_settled_once_whatever_partition_it_is_in(rows: Rows) -> None:
    """Places (ctid) repeat between partitions: claims and settlements take exactly theirs."""
    ids = [rows.send(n) for n in range(25)]
    claimed = rows.claim()
    assert sorted(row.fence.msg_id for row in claimed) == ids
    owned = [row.fence for row in claimed]
    assert rows.renew(*owned[:3], lease_s=60).keys() == {1, 2, 3}
    assert sorted(rows.ack(*owned[:5])) == [1, 2, 3, 4, 5]
    assert sorted(rows.ack(*owned[5:10], archive=True)) == [1, 2, 3, 4, 5]
    assert rows.ask(f"select count(*) from pgmq.a_{QUEUE}") == 5
    entry = accounts(QUEUE, owned[10].msg_id, refunds=1)
    assert rows.retry(owned[10], accounts=entry) == [1]
    assert rows.release(*owned[11:13]) == [1, 2]
    assert sorted(rows.dead_letter(*owned[13:23], envelope=ENVELOPE)) == list(range(1, 11))
    again = rows.claim()
    assert sorted(row.fence.msg_id for row in again) == sorted(fence.msg_id for fence in owned[10:13])
    assert rows.count() == 5


def test_two_rows_of_one_number_are_two_messages(rows: Rows) -> None:
    """The number is not unique there: the fence tells them apart."""
    for value in "12":
        rows.connection.execute(
            f"insert into pgmq.q_{QUEUE} (msg_id, vt, message) overriding system value values (5, now(), '{value}')"
        )
    first, second = rows.claim()
    assert first.fence.msg_id == second.fence.msg_id == 5
    assert first.fence != second.fence
    assert rows.ack(second.fence) == [1]
    assert rows.ask(f"select message::text from pgmq.q_{QUEUE}") == (first.body or b"").decode()


def test_transactional_claims_and_purges_work_there(rows: Rows, database: str) -> None:
    """The other statements that go by place."""
    for n in range(25):
        rows.send(n)
    with rows.connection.transaction():
        claim = claimed_in(rows.connection, QUEUE)
        assert rows.run(transactions.tx_ack_archive(QUEUE), **claim.settled_by) == [(claim.msg_id,)]
    assert rows.run(queues.purge_batch(QUEUE), limit=7) == [(7,)]
    assert rows.count() == 17
    [info] = [info for info in Admin(rows.connection).list_queues() if info.name == QUEUE]
    assert (info.storage, info.visible, info.archived) == ("partitioned", 17, 1)
    Admin(rows.connection).drop_queue(QUEUE)

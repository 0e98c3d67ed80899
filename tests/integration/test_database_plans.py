"""Plans that are kept: made while a queue was empty, they must serve it when it is full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.pgmq.records import Fence
from shared.pgmq.statements import claiming, settling
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.database.arrays import fences
from supervisor.database.connections import Connection, ConnectionOptions, Connections
from tests.support.pooler import transaction_pooler
from tests.support.rows import QUEUE, Rows
from tests.support.shell import NAME, running

_OFTEN = 8  # after five uses the server may keep a plan for all parameters
_PARAMETERS = {"lease_ms": 1, "budget": 1 << 20, "body_limit": claiming.BODY_LIMIT, "headers_limit": claiming.NO_LIMIT}


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database, empty and vacuumed: to the planner it has no page at all."""
    with Rows(database) as found:
        found.send(1)
        found.connection.execute(f"delete from pgmq.q_{QUEUE}")
        found.connection.execute(f"vacuum analyze pgmq.q_{QUEUE}")
        yield found


async def _connect(dsn: str) -> Connection:
    return await Connections(dsn, ConnectionOptions()).connect("work")


async def _claim(connection: Connection, limit: int) -> int:
    cursor = await connection.cursor(binary=True).execute(claiming.claim(QUEUE, limit), _PARAMETERS, prepare=True)
    return sum(row[0] is not None for row in await cursor.fetchall())


async def test_a_claim_is_planned_once_and_goes_by_the_indexes(rows: Rows, database: str) -> None:
    """Also where reading the whole table, and sorting it, looked cheapest when the plan was made."""
    async with await _connect(database) as connection:
        for _ in range(_OFTEN):
            assert await _claim(connection, 100) == 0
        rows.connection.execute(
            f"insert into pgmq.q_{QUEUE} (vt, message) select clock_timestamp(), '1' from generate_series(1, 1000)"
        )
        assert await _claim(connection, 100) == 100
        found = await connection.execute("select name, generic_plans from pg_prepared_statements", prepare=False)
        [(name, generic_plans)] = await found.fetchall()
        assert generic_plans > 0
        explained = await connection.execute(f'explain execute "{name}" (1, 1, 1, 1)', prepare=False)
        plan = "\n".join(line for (line,) in await explained.fetchall())
        assert f"Index Scan using q_{QUEUE}_vt_idx" in plan
        assert "Tid Scan" in plan
        assert "Seq Scan" not in plan


async def test_an_acknowledgement_goes_by_the_key(rows: Rows, database: str) -> None:
    """However few rows the table seemed to have."""
    wanted = fences([Fence(n, 1, 1) for n in range(1, 101)])
    async with await _connect(database) as connection:
        for _ in range(_OFTEN):
            await connection.cursor(binary=True).execute(settling.ack_delete(QUEUE), wanted, prepare=True)
        found = await connection.execute("select name, generic_plans from pg_prepared_statements", prepare=False)
        [(name, generic_plans)] = await found.fetchall()
        assert generic_plans > 0
        arrays = ", ".join(f"'{text}'" for text in wanted.values())
        explained = await connection.execute(f'explain execute "{name}" ({arrays})', prepare=False)
        plan = "\n".join(line for (line,) in await explained.fetchall())
        assert "Index Cond: (msg_id = w.msg_id)" in plan
        assert "Seq Scan" not in plan


@pytest.mark.parametrize("takes_options", [False, True], ids=["refuses-options", "drops-options"])
async def test_behind_a_transaction_pooler_nothing_is_prepared(rows: Rows, database: str, takes_options: bool) -> None:
    """The session that prepared it may be another one's by now."""
    rows.send(1)
    with transaction_pooler(database, takes_options=takes_options) as pooled:
        async with await _connect(pooled) as connection:
            for _ in range(_OFTEN):
                await _claim(connection, 1)
            found = await connection.execute("select count(*) from pg_prepared_statements")
            assert await found.fetchone() == (0,)


async def test_a_plan_that_is_outdated_costs_one_claim(rows: Rows, database: str) -> None:
    """An upgrade of PGMQ changed a column meanwhile."""
    async with running(database) as shell:
        await shell.claim()
        rows.connection.execute(f"alter table pgmq.q_{QUEUE} alter column read_ct type bigint")
        rows.send(1)
        shell.database.claim(c.Claim(NAME, 100, 30, 1 << 20))
        assert "cached plan" in (await shell.events.next(e.ClaimFailed)).error
        assert len(await shell.rows()) == 1

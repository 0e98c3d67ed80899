"""The database side carries out commands: exactly one answer each, whatever happens to the database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from shared.clock import boottime
from shared.errors import ConnectionLost, UnsupportedError
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
from shared.pgmq.statements import transactions
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.settings import QueueSettings
from supervisor.core.types import ClaimId, Mode, TxIdentity
from supervisor.database import Database
from supervisor.telemetry.facts import DatabaseReconnected
from tests.support.claims import claimed_in
from tests.support.proxy import Proxy
from tests.support.rows import DEAD, QUEUE, Rows, accounts
from tests.support.shell import DELETE, NAME, running
from tests.support.waiting import eventually

DONE, GONE, FAILED = SettleOutcome.DONE, SettleOutcome.GONE, SettleOutcome.FAILED
ENVELOPE = json.dumps({"version": 1, "reason": "failed", "source": {"queue": QUEUE, "msg_id": 1}})


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Give a queue in a fresh database."""
    with Rows(database) as found:
        yield found


def _kill_sessions(rows: Rows, role: str) -> int:
    """Terminate the product's sessions of a role; how many."""
    killed = rows.ask(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = %s"
        " and datname = current_database()",
        f"pgmq-supervisor {role}",
    )
    assert isinstance(killed, int)
    return killed


async def test_claim_and_acknowledge(rows: Rows, database: str) -> None:
    """A claim is answered with rows and the time before the query; an empty one with the next visible time."""
    rows.send({"n": 1}, {"h": 1})
    rows.send({"n": 2}, delay_s=3600)
    async with running(database) as shell:
        before = boottime()
        claimed = await shell.claim()
        assert before <= claimed.asked_at <= boottime()
        [row] = claimed.rows
        assert (row.body, row.headers) == (b'{"n": 1}', b'{"h": 1}')
        assert claimed.next_visible_s is None
        assert [r.outcome for r in await shell.settle((row.fence, DELETE))] == [DONE]
        assert [r.outcome for r in await shell.settle((row.fence, DELETE))] == [GONE]
        empty = await shell.claim()
        assert empty.rows == ()
        assert empty.next_visible_s == pytest.approx(3600, abs=10)


async def test_large_body_is_fetched_by_its_fence(rows: Rows, database: str) -> None:
    """Found while the claim is ours, not found afterwards; SQL NULL is found and has no body."""
    rows.send("x" * 1000)
    rows.send_text(None)
    async with running(database) as shell:
        first, second = (await shell.claim(budget=10)).rows
        assert not first.body_loaded
        shell.database.fetch_body(c.FetchBody(NAME, ClaimId(7), first.fence))
        assert await shell.events.next(e.BodyFetched) == e.BodyFetched(
            NAME, ClaimId(7), True, b'"' + b"x" * 1000 + b'"'
        )
        shell.database.fetch_body(c.FetchBody(NAME, ClaimId(8), second.fence))
        assert await shell.events.next(e.BodyFetched) == e.BodyFetched(NAME, ClaimId(8), True, None)
        await shell.settle((first.fence, DELETE))
        shell.database.fetch_body(c.FetchBody(NAME, ClaimId(9), first.fence))
        assert await shell.events.next(e.BodyFetched) == e.BodyFetched(NAME, ClaimId(9), False, None)


async def test_a_message_that_cannot_become_text_blocks_nobody(rows: Rows, database: str) -> None:
    """It is claimed alone and without a body, and can be dead-lettered inside the database."""
    wide = "[" + ",".join(["1e131071"] * 9000) + "]"  # 9 000 numbers of 131 072 digits: over a gigabyte as text
    bad = rows.send_text(wide)
    worse = rows.send_text("1", '{"h": ' + wide + "}")
    good = rows.send("good")
    async with running(database) as shell:
        found = {}
        while len(found) < 3:
            found |= {row.fence.msg_id: row for row in await shell.rows()}
        assert not found[bad].body_loaded
        assert found[worse].headers is None
        assert found[good].fence.msg_id == good
        shell.database.fetch_body(c.FetchBody(NAME, ClaimId(1), found[bad].fence))
        assert (await shell.events.next(e.BodyFetchFailed)).claim_id == 1
        letters = [(found[msg_id].fence, DeadLetter(DEAD, ENVELOPE)) for msg_id in (bad, worse)]
        assert [r.outcome for r in await shell.settle(*letters)] == [DONE, DONE]
    assert rows.count(DEAD) == 2


async def test_every_kind_of_settlement_in_one_command(rows: Rows, database: str) -> None:
    """Each kind goes its own way, in its own transaction; every item is answered once."""
    for n in range(6):
        rows.send(n)
    async with running(database) as shell:
        owned = [row.fence for row in await shell.rows()]
        results = await shell.settle(
            (owned[0], DELETE),
            (owned[1], Ack(AckMode.ARCHIVE)),
            (owned[2], Retry(3_600_000, accounts(QUEUE, owned[2].msg_id, deaths=1))),
            (owned[3], Release(accounts(QUEUE, owned[3].msg_id, refunds=1))),
            (owned[4], DeadLetter(DEAD, ENVELOPE)),
            (owned[5], Retry(0, None)),
        )
        assert [r.outcome for r in results] == [DONE] * 6
        again = await shell.rows()
        assert sorted(row.fence.msg_id for row in again) == [owned[3].msg_id, owned[5].msg_id]
    assert rows.count(DEAD) == 1
    assert rows.ask(f"select count(*) from pgmq.a_{QUEUE}") == 1
    assert rows.headers(owned[2].msg_id)["x-supervisor"]["deaths"] == 1


async def test_a_dropped_dead_letter_queue_fails_only_its_messages(rows: Rows, database: str) -> None:
    """Acknowledgements beside it go through, and so do dead letters of other queues."""
    rows.connection.execute("select pgmq.create('other_dlq')")
    for n in range(20):
        rows.send(n)
    rows.connection.execute(f"select pgmq.drop_queue('{DEAD}')")
    async with running(database) as shell:
        owned = [row.fence for row in await shell.rows()]
        kinds = [DELETE, DeadLetter(DEAD, ENVELOPE), Retry(0, None), DeadLetter("other_dlq", ENVELOPE)]
        wanted = [(fence, kinds[n % 4]) for n, fence in enumerate(owned)]
        results = await shell.settle(*wanted)
        assert [r.outcome for r in results] == [DONE, FAILED, DONE, DONE] * 5
        assert "does not exist" in (results[1].error or "")
        rows.connection.execute(f"select pgmq.create('{DEAD}')")
        later = await shell.settle(*(want for n, want in enumerate(wanted) if n % 4 == 1))
        assert [r.outcome for r in later] == [DONE] * 5


async def test_one_poisonous_settlement_fails_alone(rows: Rows, database: str) -> None:
    """A failing batch is halved until the guilty message stands alone."""
    for n in range(16):
        rows.send(n)
    async with running(database) as shell:
        owned = [row.fence for row in await shell.rows()]
        wanted = [
            (fence, DeadLetter(DEAD, '{"bad": "\\u0000"}' if n == 5 else ENVELOPE)) for n, fence in enumerate(owned)
        ]
        results = await shell.settle(*wanted)
        assert [n for n, r in enumerate(results) if r.outcome is FAILED] == [5]
        assert sum(r.outcome is DONE for r in results) == 15


async def test_a_locked_row_delays_no_other_settlement(rows: Rows, database: str) -> None:
    """It fails for now, and may be settled later: the core asks again within the lease."""
    rows.send(1)
    rows.send(2)
    async with running(database) as shell:
        first, second = [row.fence for row in await shell.rows()]
        with psycopg.connect(database) as other:
            other.execute(f"select from pgmq.q_{QUEUE} where msg_id = %s for update", [first.msg_id])
            results = await shell.settle((first, DELETE), (second, DELETE))
            assert [r.outcome for r in results] == [FAILED, DONE]
            assert "lock" in (results[0].error or "")
        assert [r.outcome for r in await shell.settle((first, DELETE))] == [DONE]


async def test_settlements_survive_the_end_of_their_sessions(rows: Rows, database: str) -> None:
    """Said again on a new connection: the fence makes a repetition harmless."""
    rows.send(1)
    async with running(database, pool_size=1) as shell:
        [row] = await shell.rows()
        assert _kill_sessions(rows, "work") == 1
        assert [r.outcome for r in await shell.settle((row.fence, DELETE))] == [DONE]
        assert (await shell.facts.next(DatabaseReconnected)).role == "work"


@pytest.mark.parametrize(("trap", "outcome"), [("swallow_reply", GONE), ("cut_before", DONE)])
async def test_a_settlement_that_is_not_answered_is_said_again(
    rows: Rows, database: str, proxy: Proxy, trap: str, outcome: SettleOutcome
) -> None:
    """On a new connection, before anybody is told that it failed; done twice it matches nothing."""
    rows.send(1)
    async with running(proxy.dsn, pool_size=1) as shell:
        [row] = await shell.rows()
        sprung = getattr(proxy, trap)(f'"a_{QUEUE}"')
        settled = await shell.settle((row.fence, Ack(AckMode.ARCHIVE)))
        assert [r.outcome for r in settled] == [outcome]
        assert sprung.sprung
        assert rows.ask(f"select count(*) from pgmq.a_{QUEUE}") == 1


async def test_renewal_answers_each_lease(rows: Rows, database: str) -> None:
    """Done, busy and lost in one answer; a lease that was settled is lost."""
    for n in range(3):
        rows.send(n)
    async with running(database) as shell:
        owned = [row.fence for row in await shell.rows(lease_s=5)]
        await shell.settle((owned[2], Retry(0, None)))
        with psycopg.connect(database) as other:
            other.execute(f"select from pgmq.q_{QUEUE} where msg_id = %s for update", [owned[1].msg_id])
            shell.renew(*owned, lease_s=60)
            renewed = await shell.events.next(e.Renewed, within_s=4)
        assert [result.claim_id for result in renewed.results] == [1, 2, 3]
        assert [result.outcome for result in renewed.results] == [
            RenewOutcome.DONE,
            RenewOutcome.BUSY,
            RenewOutcome.LOST,
        ]
        assert renewed.results[0].lease_s == pytest.approx(60, abs=1)
        assert renewed.asked_at <= boottime()


async def test_a_renewal_that_hangs_is_answered_in_time(rows: Rows, database: str) -> None:
    """A locked table holds the statement up; the answer comes within the timeout, and the next renewal works."""
    rows.send(1)
    async with running(database) as shell:
        [row] = await shell.rows()
        with psycopg.connect(database) as other:
            other.execute(f"lock table pgmq.q_{QUEUE} in access exclusive mode")
            begun_at = boottime()
            shell.renew(row.fence, timeout_s=0.5)
            shell.renew(row.fence, timeout_s=0.7)
            await shell.events.next(e.RenewFailed)
            await shell.events.next(e.RenewFailed)
            assert boottime() - begun_at < 3
        shell.renew(row.fence)
        assert (await shell.events.next(e.Renewed)).results[0].outcome is RenewOutcome.DONE


async def test_a_claim_that_hangs_is_answered(rows: Rows, database: str) -> None:
    """The statement timeout ends it, and the next claim works."""
    rows.send(1)
    async with running(database, statement_timeout_s=0.5) as shell:
        with psycopg.connect(database) as other:
            other.execute(f"lock table pgmq.q_{QUEUE} in access exclusive mode")
            shell.database.claim(c.Claim(NAME, 1, 30, 1000))
            assert "timeout" in (await shell.events.next(e.ClaimFailed)).error
        assert len(await shell.rows()) == 1


async def test_a_session_that_ended_while_nobody_used_it_is_replaced_before_its_next_use(
    rows: Rows, database: str
) -> None:
    """Seen before anything is sent: no claim fails of it."""
    rows.send(1)
    async with running(database, pool_size=1) as shell:
        assert (await shell.claim(0)).rows == ()
        _kill_sessions(rows, "work")
        await asyncio.to_thread(eventually, lambda: _kill_sessions(rows, "work") == 0)
        assert len(await shell.rows()) == 1
        assert (await shell.facts.next(DatabaseReconnected)).role == "work"
        assert not any(isinstance(event, e.ClaimFailed) for event in shell.events.all)


async def test_a_missing_queue_fails_each_command_and_nothing_else(database: str) -> None:
    """Everything is answered; nothing raises; the reason is told."""
    with Rows(database) as rows:
        rows.send(1)
    async with running(database) as shell:
        [row] = await shell.rows()
        with Rows(database, create=False) as rows:
            rows.connection.execute(f"select pgmq.drop_queue('{QUEUE}')")
        shell.database.claim(c.Claim(NAME, 1, 30, 1000))
        assert "does not exist" in (await shell.events.next(e.ClaimFailed)).error
        shell.renew(row.fence)
        await shell.events.next(e.RenewFailed)
        assert [r.outcome for r in await shell.settle((row.fence, DELETE))] == [FAILED]
        shell.database.fetch_body(c.FetchBody(NAME, ClaimId(1), row.fence))
        await shell.events.next(e.BodyFetchFailed)
        assert (await _reckon(shell, 1, 0)).outcome is ReckonOutcome.REFUSED


# --- transactional ----------------------------------------------------------------------------------------------------


async def _reckon(shell: Any, msg_id: int, before: int, tx: TxIdentity | None = None, **values: Any) -> e.Reckoned:
    settlement = values.pop("settlement", Retry(0, accounts(QUEUE, msg_id, deaths=1)))
    reckoning = Reckoning(msg_id, before, settlement, **values)
    shell.database.reckon(c.Reckon(NAME, ClaimId(5), reckoning, tx))
    answer = await shell.events.next(e.Reckoned)
    assert isinstance(answer, e.Reckoned)
    assert answer.claim_id == 5
    return answer


async def test_reckoning_says_what_became_of_an_attempt(rows: Rows, database: str) -> None:
    """Busy or taken while the row is held, done after the rollback, ours when said again, moved, gone with the row."""
    msg_id = rows.send(1)
    async with running(database) as shell:
        with psycopg.connect(database) as child:
            claim = claimed_in(child, QUEUE)
            assert (await _reckon(shell, msg_id, 0, claim.identity)).outcome is ReckonOutcome.BUSY
            other = TxIdentity(claim.xid - 1, claim.backend_pid, claim.backend_start_us)
            assert (await _reckon(shell, msg_id, 0, other)).outcome is ReckonOutcome.TAKEN
            child.rollback()
        charge = {"extra": 1, "read_at_us": claim.read_us}
        assert (await _reckon(shell, msg_id, 0, **charge)).outcome is ReckonOutcome.DONE
        assert rows.ask(f"select read_ct from pgmq.q_{QUEUE}") == 2
        assert (await _reckon(shell, msg_id, 0, **charge)).outcome is ReckonOutcome.OURS
        assert (await _reckon(shell, msg_id, 0)).outcome is ReckonOutcome.MOVED
        letter = DeadLetter(DEAD, ENVELOPE)
        assert (await _reckon(shell, msg_id, 2, settlement=letter)).outcome is ReckonOutcome.DONE
        assert (await _reckon(shell, msg_id, 2, settlement=letter)).outcome is ReckonOutcome.GONE
        assert rows.count(DEAD) == 1


async def test_reckoning_names_a_commit_in_doubt(rows: Rows, database: str) -> None:
    """The row decides; the transaction's status is its name."""
    msg_id = rows.send(1)
    async with running(database, mode=Mode.TRANSACTIONAL) as shell:
        with psycopg.connect(database) as child:
            claim = claimed_in(child, QUEUE)
            tx = claim.identity
            child.execute(transactions.tx_ack_delete(QUEUE), claim.settled_by)
            assert (await _reckon(shell, msg_id, 0, tx)).outcome is ReckonOutcome.BUSY
            child.commit()
        answer = await _reckon(shell, msg_id, 0, tx)
        assert (answer.outcome, answer.error) == (ReckonOutcome.GONE, "transaction committed")
        assert answer.committed is True
        unknown = TxIdentity(xid=2**60, backend_pid=1, backend_start_us=claim.backend_start_us)
        answer = await _reckon(shell, msg_id, 0, unknown)
        assert (answer.error, answer.committed) == ("transaction unknown", None)


async def test_the_session_of_a_killed_child_is_ended(rows: Rows, database: str) -> None:
    """Its row is free for the reckoning that follows."""
    msg_id = rows.send(1)
    async with running(database) as shell:
        child = psycopg.connect(database)
        claim = claimed_in(child, QUEUE)
        wrong = TxIdentity(claim.xid + 1, claim.backend_pid, claim.backend_start_us)
        shell.database.terminate_backend(c.TerminateBackend(NAME, wrong))
        assert (await _reckon(shell, msg_id, 0)).outcome is ReckonOutcome.BUSY
        shell.database.terminate_backend(c.TerminateBackend(NAME, claim.identity))
        async with asyncio.timeout(10):
            while (await _reckon(shell, msg_id, 0)).outcome is ReckonOutcome.BUSY:
                pass
        child.close()
    assert rows.ask(f"select read_ct from pgmq.q_{QUEUE}") == 1


# --- start, close, pauses ---------------------------------------------------------------------------------------------


async def test_start_without_a_server_or_pgmq(bare_database: str) -> None:
    """Refused with a remedy; nothing stays open."""
    queues = [QueueSettings(name=QUEUE, handler="m:f", dead_letter_queue=DEAD)]
    nowhere = Database("host=127.0.0.1 port=9 dbname=none", None, queues, post=[].append, connect_timeout_s=2)
    with pytest.raises(ConnectionLost, match="DSN"):
        await nowhere.start()
    empty = Database(bare_database, None, queues, post=[].append)
    with pytest.raises(UnsupportedError, match="init"):
        await empty.start()
    await empty.close()


async def test_close_carries_out_what_was_given(rows: Rows, database: str) -> None:
    """Settlements that were handed over before the close are done; a second close does nothing."""
    for n in range(500):
        rows.send(n)
    async with running(database) as shell:
        items = [(row.fence, DELETE) for row in await shell.rows(limit=500)]
        settling = asyncio.ensure_future(shell.settle(*items))
        await asyncio.sleep(0)
        await shell.database.close()
        assert {r.outcome for r in await settling} == {DONE}
    assert rows.count() == 0


async def test_pauses_are_seen_by_every_supervisor(rows: Rows, database: str) -> None:
    """One pauses, the other hears of it, and of the resume; a restart knows it before anything else."""
    rows.connection.execute("create schema pgmq_supervisor")
    rows.connection.execute(
        "create table pgmq_supervisor.paused (queue text primary key, paused_at timestamptz default now(), by text)"
    )
    async with running(database, pause_interval_s=0.05) as one, running(database, pause_interval_s=0.05) as two:
        assert await one.database.pause(NAME, "me")
        assert await one.events.next(e.PauseChanged) == e.PauseChanged(NAME, True)
        assert await two.events.next(e.PauseChanged) == e.PauseChanged(NAME, True)
        async with running(database) as three:
            assert three.events.all == [e.PauseChanged(NAME, True)]
        assert await two.database.resume(NAME)
        assert await one.events.next(e.PauseChanged) == e.PauseChanged(NAME, False)


async def test_a_pause_without_our_schema_is_local(rows: Rows, database: str) -> None:
    """It works here and says that it is only here."""
    async with running(database, pause_interval_s=0.05) as shell:
        assert not await shell.database.pause(NAME, "me")
        assert await shell.events.next(e.PauseChanged) == e.PauseChanged(NAME, True)
        assert await shell.database.resume(NAME)
        assert await shell.events.next(e.PauseChanged) == e.PauseChanged(NAME, False)


async def test_counts_and_ping(rows: Rows, database: str) -> None:
    """Visible messages up to a limit, the age of the oldest; and whether the database answers."""
    rows.send(1, delay_s=-100)
    rows.send(2)
    rows.send(3, delay_s=100)
    async with running(database) as shell:
        counts = await shell.database.counts(QUEUE)
        assert counts is not None
        assert (counts.visible, counts.at_limit) == (2, False)
        assert counts.oldest_visible_s == pytest.approx(100, abs=5)
        limited = await shell.database.counts(QUEUE, limit=1)
        assert limited is not None
        assert (limited.visible, limited.at_limit) == (1, True)
        assert await shell.database.counts("missing") is None
        assert await shell.database.ping()

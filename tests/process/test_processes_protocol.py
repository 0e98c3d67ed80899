"""What a child may say, and what breaks the protocol: only that child suffers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from shared.pgmq.records import Ack, AckMode
from supervisor.core.commands import AnswerCommit, GrantPermit
from supervisor.core.events import (
    CommitRequested,
    Committed,
    MessageFinished,
    PermitEmpty,
    ProgressReported,
    ProtocolBroken,
    TransactionClaimed,
    TransactionEnded,
)
from supervisor.core.types import SUCCESS, ClaimId, Mode, TxIdentity
from supervisor.processes.launcher import PopenLauncher
from supervisor.processes.spec import ChildSpec
from tests.support.processes import alive, wait_for_end, world

FAKE = PopenLauncher(child_main=Path(__file__).parents[1] / "support" / "fake_child.py")


def fake(scenario: str, **fields: object) -> ChildSpec:
    """A queue of stand-ins that play one scenario."""
    return ChildSpec(handler=scenario, app_dir=".", **fields)  # type: ignore[arg-type]


async def test_a_whole_result_counts_although_the_child_died_at_once() -> None:
    """Exactly one verdict: the frame that arrived whole, told before the death."""
    async with world(fake("done_and_die"), launcher=FAKE) as it:
        for _ in range(20):
            child = await it.ready()
            claim = it.dispatch(child)
            assert (await it.died(child)).signal == "SIGKILL"
            assert it.outcome(claim) == SUCCESS


async def test_a_large_result_counts_although_the_child_died_at_once() -> None:
    """What is still to be read when its end is seen is read then."""
    async with world(fake("much_and_die"), launcher=FAKE) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        wait_for_end(it.pids[child])  # the loop stands still, and finds frame and end together
        assert (await it.died(child)).signal == "SIGKILL"
        assert it.outcome(claim) is not None


async def test_half_a_result_counts_for_nothing() -> None:
    """A frame that did not arrive whole says nothing."""
    async with world(fake("half_a_result"), launcher=FAKE) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        await it.died(child)
        assert it.outcome(claim) is None
        assert not any(isinstance(event, ProtocolBroken) for event in it.events)


@pytest.mark.parametrize(
    "scenario",
    [
        "noise",
        "wrong_seq",
        "result_twice",
        "strange_delay",
        "unknown_kind",
        "parent_frame",
        "huge_body",
        "goes_silent",
    ],
)
async def test_nonsense_breaks_the_protocol_once(scenario: str) -> None:
    """Whatever the nonsense: one ProtocolBroken, and the kill works."""
    async with world(fake(scenario), launcher=FAKE) as it:
        child = await it.ready()
        it.dispatch(child)
        broken = await it.event(ProtocolBroken, child)
        assert broken.error
        it.kill(child)
        await it.died(child)
        assert sum(isinstance(event, ProtocolBroken) for event in it.events) == 1
        assert sum(isinstance(event, MessageFinished) for event in it.events) == (scenario == "result_twice")


async def test_frames_in_pieces_are_frames() -> None:
    """Where the stream is cut does not matter."""
    async with world(fake("byte_by_byte"), launcher=FAKE) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        assert await it.finished(claim) == SUCCESS
        assert ProgressReported(child, claim, "half") in it.events


async def test_progress_of_an_earlier_message_is_dropped() -> None:
    """A thread that a message left behind harms nobody."""
    async with world(fake("stale_progress"), launcher=FAKE) as it:
        child = await it.ready()
        assert await it.finished(it.dispatch(child)) == SUCCESS
        assert not any(isinstance(event, ProgressReported | ProtocolBroken) for event in it.events)


async def test_a_large_body_does_not_block_the_loop() -> None:
    """200 MB travel in pieces, while the loop turns."""
    async with world(fake("body_size"), launcher=FAKE) as it:
        child = await it.ready()
        body = bytes(200 << 20)
        claim = it.dispatch(child, body)
        longest, last = 0.0, time.monotonic()
        while it.outcome(claim) is None:
            await asyncio.sleep(0)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        outcome = await it.finished(claim)
        assert outcome.reason is not None
        assert int(outcome.reason) > 200 << 20
        assert longest < 0.5


async def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    """No executor raises: what cannot be a frame is told as a breach."""
    async with world(fake("body_size"), launcher=FAKE) as it:
        child = await it.ready()
        it.dispatch(child, bytes((256 << 20) + 1))
        await it.event(ProtocolBroken, child)


async def test_a_transaction_is_told_step_by_step() -> None:
    """Permit, claim, request, verdict, commit."""
    async with world(fake("transaction", mode=Mode.TRANSACTIONAL), launcher=FAKE) as it:
        child = await it.ready()
        claim = ClaimId(50)
        it.processes.grant_permit(GrantPermit(child, claim, time_limit_s=1.5, owed=((3, 1),)))
        request = await it.event(CommitRequested, child)
        assert request.outcome == SUCCESS
        claimed = await it.event(TransactionClaimed, child)
        assert (claimed.msg_id, claimed.tx, claimed.read_at_us) == (7, TxIdentity(9, 10, 11), 12)
        it.processes.answer_commit(AnswerCommit(child, claim, Ack(AckMode.DELETE), keep_work=True))
        await it.event(Committed, child)

        claim = ClaimId(51)
        it.processes.grant_permit(GrantPermit(child, claim, time_limit_s=None, owed=()))
        await it.event(CommitRequested, child, nth=2)
        it.processes.answer_commit(AnswerCommit(child, claim, None, keep_work=False))
        ended = await it.event(TransactionEnded, child)
        assert (ended.claimed, ended.in_doubt, ended.outcome) == (True, False, None)
        assert not any(isinstance(event, PermitEmpty) for event in it.events)


async def test_a_full_socket_of_a_stopped_child_is_bounded() -> None:
    """What a child does not read waits, up to a limit; it can be killed all the same."""
    async with world(fake("body_size"), launcher=FAKE) as it:
        child = await it.ready()
        it.dispatch(child, bytes(150 << 20))
        it.dispatch(child, bytes(150 << 20))
        await it.event(ProtocolBroken, child)
        pid = it.pids[child]
        it.kill(child)
        await it.died(child)
        assert not alive(pid)

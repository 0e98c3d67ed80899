"""One kill point, carried out once and judged.

    trap at the point ─▶ send ─▶ somebody stands there ─▶ kill ─▶ look at the row ─▶ child: what the parent settles
                                                                                 └▶ parent: ruins, then a new one
    ─▶ wait for the end of the message ─▶ compare

Nothing is judged by what a process said before it died: only by the row, the ledger, and what is left.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from crashtests.checker import Verdict
from crashtests.kill_points import Case, Mode, Point, RowState, Settled
from crashtests.ledger import Row, Sent
from crashtests.nemesis import Order, Victim, struck
from crashtests.processes import Process, wait_until
from crashtests.rendezvous import Crossing, Meeting, NotReached, Trap
from crashtests.scene import BACKOFF_S, REGULAR, TRANSACTIONAL, Scene

__all__ = ["CaseRun", "run_case"]

_REACH_S: Final = 60.0  # a machine that does other things too
_END_S: Final = 60.0
_GONE_S: Final = 10.0
_RECKONINGS: Final = 200  # the killed child's session may hold the row for a while
_QUEUE: Final = {Mode.REGULAR: REGULAR, Mode.TRANSACTIONAL: TRANSACTIONAL}
_SETTLES: Final = {Mode.REGULAR: "parent.settle.after", Mode.TRANSACTIONAL: "parent.reckon.after"}
_ASKS: Final = {Mode.REGULAR: "parent.claim.before", Mode.TRANSACTIONAL: "child.tx.before_claim"}


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One case, carried out once."""

    case: Case
    order: Order | None
    verdict: Verdict
    seen: str
    repeats: int
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Look:
    """What is seen on the way; `problems` are promises that were broken."""

    row: Row | None = None
    committed: bool = False
    settled: Settled = Settled.NOTHING
    problems: list[str] = field(default_factory=list)

    def expect(self, what: str, seen: object, expected: object) -> None:
        if seen != expected:
            self.problems.append(f"{what}: {seen}, expected {expected}")


def run_case(place: Scene, case: Case, order: Order | None, op: str) -> CaseRun:
    """Carry it out. Whatever keeps it from taking place is `unknown`, whatever it breaks is `fail`."""
    look = _Look()
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(place.points.disarm)
            sent = _carry_out(place, case, order, op, look, stack)
        return _judge(place, case, order, sent, look)
    except (NotReached, psycopg.Error, OSError) as error:
        return CaseRun(case, order, Verdict.UNKNOWN, f"{type(error).__name__}: {error}", 0, (place.stage.log_tail(),))


def _carry_out(
    place: Scene, case: Case, order: Order | None, op: str, look: _Look, stack: contextlib.ExitStack
) -> Sent:
    queue = _QUEUE[case.mode]
    place.stage.start()
    sent = place.send_hidden(queue, op, door=True)
    trap = place.points.trap(case.at, where=lambda crossing: _is_about(crossing, sent))
    if case.point is Point.BEFORE_CLAIM:
        # First it stands there, then the message comes: a claim that is under way could take it.
        meeting = trap.wait(_REACH_S)
        place.reveal(sent)
    else:
        place.reveal(sent)
        meeting = trap.wait(_REACH_S)
    child = stack.enter_context(contextlib.closing(_child_of(place, meeting, queue)))
    settling: Trap | None = None
    with struck(case.victim, parent=place.stage.parent, child=child, order=order or Order.CHILD_FIRST):
        if case.victim is not Victim.CHILD and not child.wait_gone(_GONE_S):
            look.problems.append("the child outlives its parent")
        look.row, look.committed = place.row(sent), _is_committed(place, sent, look)
        if case.settled is Settled.CHARGED:
            settling = _trap_settlement(place, case, sent)
    if case.victim is Victim.CHILD:
        meeting.release()
        if settling is not None:
            look.settled = _watch_settlement(place, case, sent, settling, look)
    else:
        _look_at_ruins(place, sent, look)
        before = len(place.points.crossings)
        place.stage.start()
        # The new one must have looked: that nothing is delivered again says little as long as nobody asks.
        asked = wait_until(lambda: any(c.point == _ASKS[case.mode] for c in place.points.crossings[before:]), _REACH_S)
        if not asked:
            raise NotReached("the new supervisor did not ask for messages")
    if not place.wait_ended([sent], _END_S):
        look.problems.append("it did not come to its end:\n" + place.stage.log_tail())
    return sent


def _is_about(crossing: Crossing, sent: Sent) -> bool:
    """Points say of what they are as far as it is known there."""
    ids = crossing.ids
    return bool(ids.get("queue", sent.queue) == sent.queue and ids.get("msg_id", sent.msg_id) == sent.msg_id)


def _child_of(place: Scene, meeting: Meeting, queue: str) -> Process:
    """The child of this queue that lives: the one that stands here, or the idle one."""
    if meeting.crossing.process != "parent":
        return Process(meeting.crossing.pid)
    for boot in reversed(place.points.crossings):
        if boot.point == "child.boot.ready" and boot.ids.get("queue") == queue:
            with contextlib.suppress(ProcessLookupError):
                process = Process(boot.pid)
                if not process.gone:
                    return process
                process.close()
    raise NotReached(f"no child of {queue} lives")


def _is_committed(place: Scene, sent: Sent, look: _Look) -> bool:
    """Whether the acknowledgement is there; in transactional mode with its business row, or neither."""
    acked = place.is_archived(sent)
    if sent.queue == TRANSACTIONAL:
        look.expect("business row", place.has_business(sent.op), acked)
    return acked


def _look_at_ruins(place: Scene, sent: Sent, look: _Look) -> None:
    """Nothing of a dead supervisor lives on, and nothing that it had begun comes true afterwards."""
    for pid in place.stage.wait_for_silence(_GONE_S):
        look.problems.append(f"process {pid} outlives its supervisor")
    if not place.wait_sessions_gone(_GONE_S):
        look.problems.append("a session outlives its supervisor")
    later = place.row(sent)
    look.expect("deliveries when all is quiet", later and later.read_ct, look.row and look.row.read_ct)
    look.expect("committed when all is quiet", _is_committed(place, sent, look), look.committed)


# --- what a parent that lives makes of a death ------------------------------------------------------------------------


def _trap_settlement(place: Scene, case: Case, sent: Sent) -> Trap:
    return place.points.trap(_SETTLES[case.mode], where=lambda found: found.ids.get("msg_id") == sent.msg_id)


def _watch_settlement(place: Scene, case: Case, sent: Sent, trap: Trap, look: _Look) -> Settled:
    """Read the row right behind the parent's statement, while the parent stands still."""
    for _ in range(_RECKONINGS):
        meeting = trap.wait(_REACH_S)
        row = place.row(sent)
        if row is not None and not row.accounts:  # its session had not ended yet: asked again in a moment
            trap = _trap_settlement(place, case, sent)
            meeting.release()
            continue
        meeting.release()
        return _name_settlement(row, look)
    raise NotReached("the row stayed locked")


def _name_settlement(row: Row | None, look: _Look) -> Settled:
    if row is None:
        look.problems.append("the row is gone after the death of its child")
        return Settled.NOTHING
    accounts: dict[str, Any] = row.accounts
    look.expect("deliveries after the settlement", row.read_ct, 1)
    if accounts.get("deaths") == 1 and accounts.get("refunds") == 0:
        if not 0.0 < row.visible_in_s <= BACKOFF_S:
            look.problems.append(f"visible in {row.visible_in_s:.3f} s, the backoff is {BACKOFF_S:g} s")
        return Settled.CHARGED
    look.problems.append(f"accounts: {accounts}")
    return Settled.NOTHING


# --- judgement --------------------------------------------------------------------------------------------------------


def _judge(place: Scene, case: Case, order: Order | None, sent: Sent, look: _Look) -> CaseRun:
    entries = place.entries(sent.op)
    begun = [entry for entry in entries if entry.what == "begin"]
    ended = [entry for entry in entries if entry.what == "end"]
    attempt = ended[-1].attempt if ended else 0
    row = look.row
    state = RowState.GONE if row is None else RowState.VISIBLE if row.visible else RowState.LEASED
    settled = look.settled
    if case.settled is Settled.REDISPATCHED:
        # Undisturbed it is never given back. Where no other child was ready before its first renewal it was, uncharged.
        settled = Settled.REDISPATCHED if place.archived_read_ct(sent) == 1 else Settled.REFUNDED
    look.expect("row after the kill", str(state), str(case.row))
    look.expect("deliveries after the kill", 1 if row is None else row.read_ct, case.read_ct)
    look.expect("acknowledged at the kill", look.committed, case.committed)
    if {settled, case.settled} != {Settled.REDISPATCHED, Settled.REFUNDED}:
        look.expect("settled", str(settled), str(case.settled))
    look.expect("handler runs", len(begun), case.runs)
    look.expect("attempt of the acknowledged run", attempt, case.attempt)
    look.expect("acknowledged in the end", place.is_archived(sent), True)
    seen = case.describe(state, settled, committed=look.committed, runs=len(begun), attempt=attempt)
    verdict = Verdict.FAIL if look.problems else Verdict.OK
    return CaseRun(case, order, verdict, seen, max(0, len(begun) - 1), tuple(look.problems))

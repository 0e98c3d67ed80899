"""The table of the failure model: six kill points, three victims, two modes; where each is, and what must come of it.

`at` names the sync point where a process is held. Where the victim does not stand there itself (an idle child, a
parent whose child stands), it is killed while the other one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from crashtests.nemesis import Victim

__all__ = ["CASES", "Case", "Mode", "Point", "RowState", "Settled"]


class Mode(StrEnum):
    """The mode of a queue."""

    REGULAR = "regular"
    TRANSACTIONAL = "transactional"


class Point(StrEnum):
    """The kill points of the failure model, in its words."""

    BEFORE_CLAIM = "before claim"
    AFTER_CLAIM = "after claim, before handler"
    DURING = "during handler"
    EFFECT_DONE = "effect done, before ack"
    BEFORE_COMMIT = "before commit"
    AFTER_COMMIT = "after ack/commit has returned"


class RowState(StrEnum):
    """The message's row at the instant after the kill."""

    VISIBLE = "visible"
    LEASED = "under its lease"
    GONE = "gone"


class Settled(StrEnum):
    """What the parent that lives does about a killed child."""

    NOTHING = ""
    REDISPATCHED = "to another child at once, uncharged"
    REFUNDED = "given back at once, refunded"
    CHARGED = "a death charged, visible after its backoff"


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    `row`, `read_ct`, `committed` are what stands in the database right after the kill: the row, its delivery count, and
    whether business row (transactional) and acknowledgement are there. `runs` is how often the handler begins in all.
    """

    point: Point
    victim: Victim
    mode: Mode
    at: str
    row: RowState
    read_ct: int
    runs: int
    attempt: int  # of the run that is acknowledged
    settled: Settled = Settled.NOTHING
    committed: bool = False

    @property
    def name(self) -> str:
        """As a row is called in reports."""
        return f"{self.point} / {self.victim} / {self.mode}"

    @property
    def expected(self) -> str:
        """In words."""
        return self.describe(self.row, self.settled, committed=self.committed, runs=self.runs, attempt=self.attempt)

    def describe(self, row: RowState, settled: Settled, *, committed: bool, runs: int, attempt: int) -> str:
        """What was expected or seen of this case, in the same words."""
        if committed:
            state = "both present, no redelivery" if self.mode is Mode.TRANSACTIONAL else "gone, no redelivery"
        elif settled is not Settled.NOTHING:
            state = str(settled)
        elif row is RowState.LEASED:
            # With a living parent it just goes on; without one it has to wait.
            state = "under its lease" if self.victim is Victim.CHILD else "redelivered after its lease"
        else:
            state = str(row)
        if self.mode is Mode.TRANSACTIONAL and self.point is not Point.BEFORE_CLAIM and not committed:
            state = f"rolled back, {state}"
        times = "once" if runs == 1 else "twice" if runs == 2 else f"{runs} times"
        return f"{state}; handler runs {times}; acknowledged in attempt {attempt}"


_C, _P, _B = Victim.CHILD, Victim.PARENT, Victim.BOTH
_R, _T = Mode.REGULAR, Mode.TRANSACTIONAL
_V, _L, _G = RowState.VISIBLE, RowState.LEASED, RowState.GONE
_CLAIM, _GIVEN = "parent.claim.before", "child.dispatch.received"
_MIDDLE, _DONE = "handler.middle", "child.result.before_send"
_ACK, _ACKED = "parent.settle.before", "parent.settle.after"

CASES: Final = (
    # --- regular
    Case(Point.BEFORE_CLAIM, _C, _R, _CLAIM, _V, 0, 1, 1),
    Case(Point.BEFORE_CLAIM, _P, _R, _CLAIM, _V, 0, 1, 1),
    Case(Point.BEFORE_CLAIM, _B, _R, _CLAIM, _V, 0, 1, 1),
    Case(Point.AFTER_CLAIM, _C, _R, _GIVEN, _L, 1, 1, 1, Settled.REDISPATCHED),
    Case(Point.AFTER_CLAIM, _P, _R, "parent.claim.after", _L, 1, 1, 2),
    Case(Point.AFTER_CLAIM, _B, _R, _GIVEN, _L, 1, 1, 2),
    Case(Point.DURING, _C, _R, _MIDDLE, _L, 1, 2, 2, Settled.CHARGED),
    Case(Point.DURING, _P, _R, _MIDDLE, _L, 1, 2, 2),
    Case(Point.DURING, _B, _R, _MIDDLE, _L, 1, 2, 2),
    Case(Point.EFFECT_DONE, _C, _R, _DONE, _L, 1, 2, 2, Settled.CHARGED),
    Case(Point.EFFECT_DONE, _P, _R, _DONE, _L, 1, 2, 2),
    Case(Point.EFFECT_DONE, _B, _R, _DONE, _L, 1, 2, 2),
    # The ack is a commit of its own: the parent stands right before it, and the child's death changes nothing.
    Case(Point.BEFORE_COMMIT, _C, _R, _ACK, _L, 1, 1, 1),
    Case(Point.BEFORE_COMMIT, _P, _R, _ACK, _L, 1, 2, 2),
    Case(Point.BEFORE_COMMIT, _B, _R, _ACK, _L, 1, 2, 2),
    Case(Point.AFTER_COMMIT, _C, _R, _ACKED, _G, 1, 1, 1, committed=True),
    Case(Point.AFTER_COMMIT, _P, _R, _ACKED, _G, 1, 1, 1, committed=True),
    Case(Point.AFTER_COMMIT, _B, _R, _ACKED, _G, 1, 1, 1, committed=True),
    # --- transactional: a rollback undoes the claim and its read_ct
    Case(Point.BEFORE_CLAIM, _C, _T, "child.tx.before_claim", _V, 0, 1, 1),
    Case(Point.BEFORE_CLAIM, _P, _T, "child.tx.before_claim", _V, 0, 1, 1),
    Case(Point.BEFORE_CLAIM, _B, _T, "child.tx.before_claim", _V, 0, 1, 1),
    # A claim of a small message is told together with the start of its handler: here the parent knows of none.
    Case(Point.AFTER_CLAIM, _C, _T, "child.tx.after_claim", _V, 0, 1, 1),
    Case(Point.AFTER_CLAIM, _P, _T, "child.tx.after_claim", _V, 0, 1, 1),
    Case(Point.AFTER_CLAIM, _B, _T, "child.tx.after_claim", _V, 0, 1, 1),
    Case(Point.DURING, _C, _T, _MIDDLE, _V, 0, 2, 2, Settled.CHARGED),
    Case(Point.DURING, _P, _T, _MIDDLE, _V, 0, 2, 1),
    Case(Point.DURING, _B, _T, _MIDDLE, _V, 0, 2, 1),
    Case(Point.EFFECT_DONE, _C, _T, "child.tx.before_commit_request", _V, 0, 2, 2, Settled.CHARGED),
    Case(Point.EFFECT_DONE, _P, _T, "parent.verdict.before", _V, 0, 2, 1),
    Case(Point.EFFECT_DONE, _B, _T, "child.tx.before_commit_request", _V, 0, 2, 1),
    Case(Point.BEFORE_COMMIT, _C, _T, "child.tx.before_commit", _V, 0, 2, 2, Settled.CHARGED),
    Case(Point.BEFORE_COMMIT, _P, _T, "child.tx.before_commit", _V, 0, 2, 1),
    Case(Point.BEFORE_COMMIT, _B, _T, "child.tx.before_commit", _V, 0, 2, 1),
    Case(Point.AFTER_COMMIT, _C, _T, "child.tx.after_commit", _G, 1, 1, 1, committed=True),
    Case(Point.AFTER_COMMIT, _P, _T, "child.tx.after_commit", _G, 1, 1, 1, committed=True),
    Case(Point.AFTER_COMMIT, _B, _T, "child.tx.after_commit", _G, 1, 1, 1, committed=True),
)

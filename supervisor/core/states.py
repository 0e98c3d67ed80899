"""The state machines of a delivery and of a child, as tables. What is not in a table cannot happen.

`move` refuses every other step with an `IllegalTransition`, in production too: a core in a state that nobody thought
of must stop, not guess. The diagrams in docs/state-machines.md are generated from these tables.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class DeliveryState(StrEnum):
    """Regular mode: a claimed message in our hands. Transactional mode: an attempt, from its permit on."""

    WAITING = "waiting"  # claimed, no child yet
    LOADING = "loading"  # its large body is being fetched, a child is reserved
    DISPATCHED = "dispatched"  # sent to a child, not yet started
    PERMITTED = "permitted"  # transactional: a child may claim
    CLAIMED = "claimed"  # transactional: claimed inside the child's transaction
    RUNNING = "running"  # the handler was called
    DECIDED = "decided"  # transactional: the verdict is granted, the commit is on its way
    SETTLING = "settling"  # a verdict stands; the database has not confirmed it
    RECKONING = "reckoning"  # transactional: the transaction is gone; the row decides
    ENDED = "ended"  # settled, or left to its lease


class ChildState(StrEnum):
    STARTING = "starting"  # spawned, not READY
    IDLE = "idle"  # READY, no message
    RESERVED = "reserved"  # waits for a body that is being fetched
    BUSY = "busy"  # a dispatch or a permit is in its hands
    EXITING = "exiting"  # asked to end in order
    KILLED = "killed"  # the kill is sent
    UNKILLABLE = "unkillable"  # still there after the kill: given up
    GONE = "gone"  # reaped


_D = DeliveryState
_C = ChildState

DELIVERY: Final[dict[DeliveryState, frozenset[DeliveryState]]] = {
    _D.WAITING: frozenset({_D.LOADING, _D.DISPATCHED, _D.SETTLING}),
    _D.LOADING: frozenset({_D.WAITING, _D.DISPATCHED, _D.SETTLING, _D.ENDED}),
    _D.DISPATCHED: frozenset({_D.WAITING, _D.RUNNING, _D.SETTLING, _D.ENDED}),
    _D.PERMITTED: frozenset({_D.CLAIMED, _D.ENDED}),
    _D.CLAIMED: frozenset({_D.RUNNING, _D.DECIDED, _D.RECKONING, _D.ENDED}),
    _D.RUNNING: frozenset({_D.SETTLING, _D.DECIDED, _D.RECKONING, _D.ENDED}),
    _D.DECIDED: frozenset({_D.RECKONING, _D.ENDED}),
    _D.SETTLING: frozenset({_D.ENDED}),
    _D.RECKONING: frozenset({_D.ENDED}),
    _D.ENDED: frozenset(),
}

CHILD: Final[dict[ChildState, frozenset[ChildState]]] = {
    _C.STARTING: frozenset({_C.IDLE, _C.KILLED, _C.GONE}),
    _C.IDLE: frozenset({_C.RESERVED, _C.BUSY, _C.EXITING, _C.KILLED, _C.GONE}),
    _C.RESERVED: frozenset({_C.IDLE, _C.BUSY, _C.KILLED, _C.GONE}),
    _C.BUSY: frozenset({_C.IDLE, _C.KILLED, _C.GONE}),
    _C.EXITING: frozenset({_C.KILLED, _C.GONE}),
    _C.KILLED: frozenset({_C.UNKILLABLE, _C.GONE}),
    _C.UNKILLABLE: frozenset({_C.GONE}),
    _C.GONE: frozenset(),
}

exercised: set[tuple[str, str, str]] | None = None
"""Set by tests: collects (machine, from, to) of every step taken."""


class IllegalTransition(AssertionError):
    """A step that no table has: a defect of ours."""


def check_delivery(before: DeliveryState, after: DeliveryState) -> None:
    """Raises `IllegalTransition` for a step that is not in the table."""
    if after not in DELIVERY[before]:
        raise IllegalTransition(f"delivery: {before} -> {after}")
    if exercised is not None:
        exercised.add(("delivery", before, after))


def check_child(before: ChildState, after: ChildState) -> None:
    """Raises `IllegalTransition` for a step that is not in the table."""
    if after not in CHILD[before]:
        raise IllegalTransition(f"child: {before} -> {after}")
    if exercised is not None:
        exercised.add(("child", before, after))

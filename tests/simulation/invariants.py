"""What must hold in a core after every step."""

from __future__ import annotations

from supervisor.core.core import Core
from supervisor.core.queue import QueueMachine
from supervisor.core.regular import RegularQueue
from supervisor.core.states import ChildState, DeliveryState
from tests.simulation.ledger import Violation

_HOLDING = frozenset({ChildState.RESERVED, ChildState.BUSY, ChildState.KILLED})
_SLACK_S = 0.002


def check_core(core: Core, now: float) -> None:
    """Raises `Violation`."""
    held_bytes = 0
    for machine in core._queues.values():
        in_hand = _check_children(machine)
        if isinstance(machine, RegularQueue):
            held_bytes += _check_regular(machine, in_hand, now)
    if core._ctx.held_bytes != held_bytes:
        raise Violation("held bytes are counted", f"{core._ctx.held_bytes}, really {held_bytes}")


def _check_children(machine: QueueMachine) -> int:
    """Returns the number of messages in children."""
    pool, settings = machine.pool, machine.settings
    alive = in_hand = idle = 0
    for child in pool.children.values():
        alive += child.alive
        if child.delivery is not None:
            in_hand += 1
            if child.state not in _HOLDING or child.delivery.state is DeliveryState.ENDED:
                raise Violation("hands and states agree", f"{child}")
        elif child.state is ChildState.BUSY or child.state is ChildState.RESERVED:
            raise Violation("every busy child has a delivery", f"{child}")
        elif child.state is ChildState.IDLE and not child.retiring:
            idle += 1
    if alive > pool.size + 1:
        raise Violation("children within their limit", f"{alive} alive, {pool.size} wanted")
    if in_hand > settings.concurrency:
        raise Violation("messages in children within concurrency", f"{in_hand} > {settings.concurrency}")
    if pool.busy != in_hand or len(pool.idle) != idle:
        raise Violation("the pool counts right", f"busy {pool.busy}/{in_hand}, idle {len(pool.idle)}/{idle}")
    return in_hand


def _check_regular(machine: RegularQueue, in_hand: int, now: float) -> int:
    """Returns the bytes that wait."""
    waiting = machine.waiting
    if len(waiting) + in_hand > machine.pacing.max_in_flight:
        raise Violation("in flight within its limit", f"{len(waiting)} + {in_hand} > {machine.pacing.max_in_flight}")
    held_bytes = 0
    for delivery in waiting:
        if delivery.state is not DeliveryState.WAITING:
            raise Violation("hands and states agree", f"{delivery}")
        if now > delivery.claimed_at + machine.timing.hold_limit_s + _SLACK_S or now >= delivery.lease_deadline:
            raise Violation("nothing waits beyond its limit", f"{delivery} at {now}")
        if delivery.body_loaded:
            held_bytes += delivery.body_bytes
    return held_bytes

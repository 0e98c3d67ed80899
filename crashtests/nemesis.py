"""The nemesis: kills a child, a parent or both, in a known order and at a known instant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from crashtests.processes import Process

__all__ = ["Order", "Victim", "struck"]

_DEATH_LIMIT_S: Final = 10.0


class Victim(StrEnum):
    """Who is killed."""

    CHILD = "child"
    PARENT = "parent"
    BOTH = "both"


class Order(StrEnum):
    """Who goes first, where both are killed."""

    CHILD_FIRST = "child first"
    PARENT_FIRST = "parent first"


@contextlib.contextmanager
def struck(victim: Victim, *, parent: Process, child: Process, order: Order = Order.CHILD_FIRST) -> Iterator[None]:
    """Kill, and give the instant after it: within the block nobody who is still alive has noticed yet.

    A parent that shall not notice the death of its child is stopped meanwhile; it goes on at the end of the block.
    """
    match victim, order:
        case Victim.CHILD, _:
            parent.freeze()
            try:
                _end(child)
                yield
            finally:
                parent.thaw()  # also where it had not stopped yet: the signal may still be on its way
        case Victim.PARENT, _:
            _end(parent)
            yield
        case Victim.BOTH, Order.CHILD_FIRST:
            parent.freeze()
            _end(child)
            _end(parent)
            yield
        case _:
            parent.kill()
            child.kill()
            _end(parent)
            _end(child)
            yield


def _end(process: Process) -> None:
    process.kill()
    if not process.wait_gone(_DEATH_LIMIT_S):
        raise TimeoutError(f"{process} was killed and does not die")

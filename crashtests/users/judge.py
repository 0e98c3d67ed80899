"""From the effects that were expected and those that were seen to a verdict, and from verdicts to advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from crashtests.kill_points import Mode
from crashtests.users.probe import Counts
from crashtests.users.trial import End, Place, Seen

__all__ = ["Judged", "Kind", "advise", "is_violation", "judge"]


class Kind(StrEnum):
    """What a kill at one place leads to. Ordered from good to bad."""

    OK = "ok"
    REPEATED = "repeated"
    UNKNOWN = "unknown"
    REPEATED_INSIDE = "repeated inside the transaction"
    HALF_DONE = "half-done"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Judged:
    """One place with what it led to. `text` is for people."""

    place: Place
    kind: Kind
    seen: Seen | None
    text: str


_ALWAYS_WRONG: Final = frozenset({Kind.LOST, Kind.HALF_DONE, Kind.REPEATED_INSIDE, Kind.UNKNOWN})


def is_violation(kind: Kind, *, strict: bool) -> bool:
    """Whether it fails the run. Repeated effects outside the database are what every queue may lead to."""
    return kind in _ALWAYS_WRONG or (strict and kind is Kind.REPEATED)


def judge(place: Place, seen: Seen, *, expected: Counts, inside: frozenset[str]) -> Judged:
    """Compare with an undisturbed run. `inside`: effects that its transaction keeps invisible until the commit."""
    found = seen.counts
    missing = [name for name, count in expected.items() if found.get(name, 0) < count]
    done = [name for name, count in expected.items() if count and found.get(name, 0) > 0]
    more = [name for name in found if found[name] > expected.get(name, 0)]
    if seen.end is End.OPEN:
        return Judged(place, Kind.UNKNOWN, seen, "the message did not come to its end in time")
    if seen.end is End.DEAD_LETTERED:
        if done:
            text = (
                f"{_list(done)} done, and the message dead-lettered: the second run failed on what the first had done"
            )
            return Judged(place, Kind.HALF_DONE, seen, text)
        return Judged(place, Kind.LOST, seen, "dead-lettered without an effect: one kill used up what it was allowed")
    if missing and not done:
        return Judged(place, Kind.LOST, seen, "acknowledged, and no effect is there")
    if missing:
        return Judged(place, Kind.HALF_DONE, seen, f"acknowledged without {_list(missing)}")
    if twice := [name for name in more if name in inside]:
        return Judged(place, Kind.REPEATED_INSIDE, seen, f"{_list(twice)} committed more than once")
    if more:
        once = [name for name in expected if name not in more]
        text = f"{_list(more)} again" + (f", {_list(once)} once" if once else "")
        return Judged(place, Kind.REPEATED, seen, text)
    return Judged(place, Kind.OK, seen, _between(seen, expected))


def _between(seen: Seen, expected: Counts) -> str:
    """What could be seen of it in the meantime."""
    if seen.between is None:
        return "once"
    done = [name for name, count in expected.items() if count and seen.between.get(name, 0) >= count]
    if done and len(done) < len([name for name, count in expected.items() if count]):
        return f"once in the end; at the kill only {_list(done)} was there"
    return "once"


def _list(names: Sequence[str]) -> str:
    return " and ".join(names)


def advise(mode: Mode, judged: Sequence[Judged], inside: frozenset[str]) -> list[str]:
    """What to do about it, once each."""
    kinds = {one.kind for one in judged}
    advice = []
    if Kind.LOST in kinds:
        advice.append(
            "lost: the handler returned before its work was safe. Wait for threads and tasks that it starts, flush and "
            "fsync what it writes, await what it sends, and only then return."
        )
    if Kind.HALF_DONE in kinds:
        advice.append(
            "half-done: what a first run had done makes the second one fail, or skip the rest. Let each step ask by "
            "a stable operation id (from the message's body, not from the attempt) whether it is done, and go on."
        )
    if Kind.REPEATED_INSIDE in kinds:
        advice.append(
            "repeated inside the transaction: something commits on its own. Use `tx` for every statement, and let "
            "nobody else open a connection for the same work."
        )
    if Kind.REPEATED in kinds:
        advice.append(
            "repeated: no queue can make an outside effect happen exactly once. Give it a stable operation id from the "
            "message's body, and let the other side refuse a second one (unique constraint, idempotency key)."
        )
        if mode is Mode.REGULAR:
            advice.append(
                "effects in this PostgreSQL can commit together with the acknowledgement: mode = "
                '"transactional", and `tx` for every statement.'
            )
        elif inside:
            advice.append(f"inside the transaction, together with the acknowledgement: {_list(sorted(inside))}.")
    if Kind.UNKNOWN in kinds:
        advice.append("unknown: a message did not come to its end, or the probe failed; nothing can be said of it.")
    return advice

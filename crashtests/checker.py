"""The checker: one function a rule, each with the row of the failure model that it stands for.

A rule answers with findings. `fail` is a promise that was broken, `unknown` is what cannot be said; none is `ok`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from crashtests.ledger import Entry, Truth

__all__ = ["Allowed", "Finding", "Verdict", "check", "count_repeats", "worst"]


class Verdict(StrEnum):
    """What is known in the end."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or cannot be said."""

    verdict: Verdict
    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the scenario may lead to."""

    transactional: frozenset[str] = frozenset()  # queues of that mode
    repeats: int | None = None  # handlers that ran again, over all messages; None: no limit
    letters: dict[str, str] | None = None  # by op, the reason; None: no dead letters
    overlaps: bool = False  # transactional: a lost session frees the row while its handler still runs
    exit_codes: frozenset[int | None] = frozenset({0})


Rule = Callable[[Truth, Allowed], Iterator[Finding]]


def check(truth: Truth, allowed: Allowed) -> list[Finding]:
    """Apply every rule."""
    return [finding for rule in RULES for finding in rule(truth, allowed)]


def worst(findings: Sequence[Finding]) -> Verdict:
    """Fail over unknown over ok."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.UNKNOWN if Verdict.UNKNOWN in verdicts else Verdict.OK


def count_repeats(truth: Truth) -> int:
    """How often a handler ran again, over all messages."""
    begun = Counter(entry.op for entry in truth.entries if entry.what == "begin")
    return sum(count - 1 for count in begun.values())


def _fail(rule: str, text: str) -> Finding:
    return Finding(Verdict.FAIL, rule, text)


def nothing_is_lost(truth: Truth, _allowed: Allowed) -> Iterator[Finding]:
    """Every message is acknowledged, dead-lettered or still there; and each of it once."""
    found = Counter(acked.op for acked in truth.acked)
    found.update(letter.op for letter in truth.letters)
    found.update(left.op for left in truth.left)
    for sent in truth.sent:
        if found[sent.op] == 0:
            yield _fail("lost", f"{sent.op} is nowhere")
        elif found[sent.op] > 1:
            yield _fail("twice", f"{sent.op} has {found[sent.op]} ends")
    for op in found.keys() - {sent.op for sent in truth.sent}:
        yield _fail("invented", f"{op} was never sent")


def queues_are_empty(truth: Truth, _allowed: Allowed) -> Iterator[Finding]:
    """Everything comes to its end."""
    for left in truth.left:
        yield _fail("left", f"{left.op} is still in {left.queue}")


def acks_have_effects(truth: Truth, allowed: Allowed) -> Iterator[Finding]:
    """What is acknowledged was done; nothing unfinished is ever acknowledged (design 7, grace period included)."""
    ended = {(entry.op, entry.delivery) for entry in truth.entries if entry.what == "end"}
    effects = {entry.op for entry in truth.entries if entry.what == "effect"}
    for acked in truth.acked:
        if acked.op not in effects:
            yield _fail("ack without effect", f"{acked.op} was acknowledged and not done")
        if (acked.op, acked.read_ct) not in ended:
            yield _fail("ack of unfinished work", f"{acked.op} was acknowledged in delivery {acked.read_ct}")
        if acked.queue in allowed.transactional and truth.business[acked.op] != 1:
            yield _fail("ack without commit", f"{acked.op} has {truth.business[acked.op]} business rows")


def commits_have_acks(truth: Truth, _allowed: Allowed) -> Iterator[Finding]:
    """Transactional: a business row and the acknowledgement of its message are one commit."""
    acked = {found.op for found in truth.acked}
    for op in truth.business:
        if op not in acked:
            yield _fail("commit without ack", f"{op} has a business row and was not acknowledged")


def repeats_are_caused(truth: Truth, allowed: Allowed) -> Iterator[Finding]:
    """A handler runs again only for what was killed under it."""
    repeats = count_repeats(truth)
    if allowed.repeats is not None and repeats > allowed.repeats:
        yield _fail("repeats", f"handlers ran again {repeats} times, {allowed.repeats} allowed")


def attempts_are_in_order(truth: Truth, allowed: Allowed) -> Iterator[Finding]:
    """One owner at a time: attempts never go back, and nothing is done by one after a later one has begun.

    Transactional: what a supervisor that was killed had still to charge is forgotten, so there they may go back; and
    where a session was lost, its handler may go on beside the next one until it asks for the commit that it cannot get.
    """
    by_op: dict[str, list[Entry]] = defaultdict(list)
    for entry in truth.entries:
        by_op[entry.op].append(entry)
    for op, entries in by_op.items():
        owner: tuple[int, int] | None = None
        for entry in entries:
            here = (entry.attempt, entry.pid)
            if entry.what == "begin":
                if owner is not None and entry.attempt < owner[0] and entry.queue not in allowed.transactional:
                    yield _fail("order", f"{op}: attempt {entry.attempt} began after attempt {owner[0]}")
                owner = here
            elif here != owner and not (allowed.overlaps and entry.queue in allowed.transactional):
                yield _fail("two owners", f"{op}: {entry.what} of attempt {entry.attempt} while {owner} owns it")


def letters_are_expected(truth: Truth, allowed: Allowed) -> Iterator[Finding]:
    """Only what deserves it is dead-lettered, with its reason."""
    expected = allowed.letters or {}
    for letter in truth.letters:
        if expected.get(letter.op) != letter.reason:
            yield _fail("dead letter", f"{letter.op}: {letter.reason}, {letter.deaths} deaths")
    for op in expected.keys() - {letter.op for letter in truth.letters}:
        yield _fail("dead letter", f"{op} was not dead-lettered")


def nothing_stays_behind(truth: Truth, allowed: Allowed) -> Iterator[Finding]:
    """After the end: no process, no session, no lock; and the exit code says how it ended."""
    for kind, found in (("process", truth.processes), ("session", truth.sessions), ("lock", truth.locks)):
        for one in found:
            yield _fail(f"left {kind}", one)
    if truth.exit_code not in allowed.exit_codes:
        yield _fail("exit code", "it did not stop in time" if truth.exit_code is None else str(truth.exit_code))


def ledger_is_whole(truth: Truth, _allowed: Allowed) -> Iterator[Finding]:
    """A torn line says that something happened, not what."""
    if truth.torn:
        yield Finding(Verdict.UNKNOWN, "torn ledger", f"{truth.torn} lines cannot be read")


RULES: Final[tuple[Rule, ...]] = (
    nothing_is_lost,
    queues_are_empty,
    acks_have_effects,
    commits_have_acks,
    repeats_are_caused,
    attempts_are_in_order,
    letters_are_expected,
    nothing_stays_behind,
    ledger_is_whole,
)

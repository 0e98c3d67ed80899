"""The checker finds each kind of broken promise: a checker that cannot fail proves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from crashtests.checker import RULES, Allowed, Verdict, check, count_repeats, worst
from crashtests.ledger import Acked, Entry, Letter, Sent, Truth, read_ledger

TX = frozenset({"tx"})


def ran(op: str, *whats: str, queue: str = "q", delivery: int = 1, pid: int = 10) -> list[Entry]:
    """Lines of one run of a handler."""
    return [Entry(op, queue, delivery, delivery, what, pid, 0.0) for what in whats]


def good() -> Truth:
    """One message of each mode, done and acknowledged."""
    whole = ("begin", "half", "effect", "end")
    return Truth(
        sent=[Sent("a", "q", 1), Sent("b", "tx", 1)],
        entries=ran("a", *whole) + ran("b", *whole, queue="tx", pid=11),
        business=Counter({"b": 1}),
        acked=[Acked("a", "q", 1, 1), Acked("b", "tx", 1, 1)],
    )


def test_what_is_good_passes() -> None:
    """No finding at all."""
    assert check(good(), Allowed(TX, repeats=0)) == []


def lose(truth: Truth) -> None:
    """Gone from everywhere."""
    truth.acked.pop(0)
    truth.entries = truth.entries[4:]


def end_twice(truth: Truth) -> None:
    """Acknowledged and dead-lettered."""
    truth.letters.append(Letter("a", "q", "died", 1, 1))


def leave(truth: Truth) -> None:
    """Still in its queue."""
    truth.acked.pop(0)
    truth.left.append(Sent("a", "q", 1))


def ack_undone(truth: Truth) -> None:
    """Acknowledged, and its handler never got to its effect."""
    truth.entries = [entry for entry in truth.entries if entry.op != "a" or entry.what == "begin"]


def ack_unfinished(truth: Truth) -> None:
    """Acknowledged in a delivery that did not end, though an earlier one had its effect."""
    truth.acked[0] = Acked("a", "q", 1, 2)


def ack_without_commit(truth: Truth) -> None:
    """Transactional: acknowledged, and the business row is not there."""
    truth.business.clear()


def commit_without_ack(truth: Truth) -> None:
    """Transactional: the business row is there, and the message too."""
    truth.acked.pop()
    truth.left.append(Sent("b", "tx", 1))


def repeat(truth: Truth) -> None:
    """A second run that nothing explains."""
    truth.entries += ran("a", "begin", "half", "effect", "end", delivery=2, pid=12)
    truth.acked[0] = Acked("a", "q", 1, 2)


def go_back(truth: Truth) -> None:
    """An attempt with a lower number after a higher one."""
    truth.entries = ran("a", "begin", delivery=2, pid=12) + truth.entries


def overlap(truth: Truth) -> None:
    """The first owner goes on after the second has begun."""
    truth.entries = truth.entries[:2] + ran("a", "begin", delivery=2, pid=12) + truth.entries[2:]


def bury(truth: Truth) -> None:
    """A dead letter that nobody deserves."""
    truth.acked.pop(0)
    truth.letters.append(Letter("a", "q", "died", 1, 1))


def leave_process(truth: Truth) -> None:
    """A daemon that lives on."""
    truth.processes.append("42 sleep 600")


def leave_session(truth: Truth) -> None:
    """A session that nobody ended."""
    truth.sessions.append("pgmq-supervisor work (idle)")


def leave_lock(truth: Truth) -> None:
    """A lock that nobody gave back."""
    truth.locks.append("advisory ExclusiveLock")


def invent(truth: Truth) -> None:
    """A message that nobody sent."""
    truth.acked.append(Acked("z", "q", 9, 1))
    truth.entries += ran("z", "begin", "effect", "end")


def exit_badly(truth: Truth) -> None:
    """A supervisor that says that it had to kill."""
    truth.exit_code = 3


def not_stop(truth: Truth) -> None:
    """A supervisor that did not stop."""
    truth.exit_code = None


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lose, "lost"),
        (end_twice, "twice"),
        (leave, "left"),
        (invent, "invented"),
        (ack_undone, "ack without effect"),
        (ack_unfinished, "ack of unfinished work"),
        (ack_without_commit, "ack without commit"),
        (commit_without_ack, "commit without ack"),
        (repeat, "repeats"),
        (go_back, "order"),
        (overlap, "two owners"),
        (bury, "dead letter"),
        (leave_process, "left process"),
        (leave_session, "left session"),
        (leave_lock, "left lock"),
        (exit_badly, "exit code"),
        (not_stop, "exit code"),
    ],
)
def test_what_is_broken_is_found(spoil: Callable[[Truth], None], rule: str) -> None:
    """Each rule, by its name."""
    truth = good()
    spoil(truth)
    findings = check(truth, Allowed(TX, repeats=0))
    assert rule in {found.rule for found in findings}
    assert worst(findings) is Verdict.FAIL


def test_a_torn_ledger_is_unknown(tmp_path: Path) -> None:
    """Half a line says that something happened, not what: neither ok nor fail."""
    path = tmp_path / "ledger"
    path.write_text(
        '{"op": "a", "queue": "q", "delivery": 1, "attempt": 1, "what": "begin", "pid": 1, "at": 0.0}\n{"op'
    )
    entries, torn = read_ledger(path)
    assert (len(entries), torn) == (1, 1)
    truth = good()
    truth.torn = torn
    assert worst(check(truth, Allowed(TX, repeats=0))) is Verdict.UNKNOWN


def test_repeats_are_runs_beyond_the_first() -> None:
    """Whatever became of them."""
    truth = good()
    repeat(truth)
    assert count_repeats(truth) == 1


def test_every_rule_has_a_reason() -> None:
    """A rule says which promise it stands for."""
    assert all(rule.__doc__ for rule in RULES)

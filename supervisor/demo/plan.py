"""What the demo sends, and what must become of each kind."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of message. `share` of all messages, at least `least`; `fate` is a dead-letter reason or None."""

    name: str
    does: str
    share: float
    least: int
    fate: str | None = None


KINDS: Final = (
    Kind("slow", "takes 250 ms", 0.10, 2),
    Kind("flaky", "fails once, then works", 0.10, 2),
    Kind("rejected", "message.dead_letter(...)", 0.02, 1, "rejected"),
    Kind("refused", "a permanent error", 0.02, 1, "failed"),
    Kind("failing", "fails at every attempt", 0.02, 1, "attempts_exhausted"),
    Kind("segfault", "reads address 0 in C", 0.02, 1, "died"),
    Kind("regex", "hangs in a regular expression", 0.0, 1, "hard_timeout"),
    Kind("deaf", "ignores TERM and sleeps", 0.0, 1, "hard_timeout"),
    Kind("hungry", "allocates without end", 0.0, 1, "memory_limit"),
    Kind("litter", "leaves a daemon behind", 0.01, 1),
)
GOOD: Final = Kind("good", "returns", 1.0, 0)
LEDGER: Final = Kind("ledger", "a row and the ack in one transaction", 0.2, 4)
LEDGER_DIES: Final = Kind("ledger+kill", "killed inside its transaction once", 0.02, 1)
EVERY_KIND: Final = (GOOD, *KINDS, LEDGER, LEDGER_DIES)  # as the account lists them
FEWEST: Final = sum(kind.least for kind in KINDS) + LEDGER.least + LEDGER_DIES.least


def compose(total: int) -> tuple[list[tuple[Kind, str]], list[tuple[Kind, str]]]:
    """Messages for the regular and the transactional queue, `total` together (at least `FEWEST`)."""
    number = 0

    def bodies(kind: Kind, count: int, **more: object) -> list[tuple[Kind, str]]:
        nonlocal number
        made = []
        for _ in range(count):
            number += 1
            made.append((kind, json.dumps({"kind": kind.name, "n": number, **more})))
        return made

    ledger = bodies(LEDGER_DIES, _count(LEDGER_DIES, total), amount=1, dies=True)
    ledger += bodies(LEDGER, _count(LEDGER, total), amount=1)
    bad = [message for kind in KINDS for message in bodies(kind, _count(kind, total))]
    good = bodies(GOOD, max(0, total - len(ledger) - len(bad)))
    # Spread the bad ones evenly between the good ones: in real queues they do not come last.
    regular: list[tuple[Kind, str]] = []
    every = max(1, len(good) // max(1, len(bad)))
    for position, message in enumerate(good):
        if position % every == 0 and bad:
            regular.append(bad.pop())
        regular.append(message)
    return regular + bad, ledger


def _count(kind: Kind, total: int) -> int:
    return max(kind.least, math.floor(kind.share * total))

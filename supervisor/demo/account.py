"""Reads from the database what became of every message: the only witness that the demo's account trusts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, LiteralString

import psycopg

REGULAR: Final = "demo"
LEDGER: Final = "demo_ledger"
QUEUES: Final = (REGULAR, LEDGER)


@dataclass(slots=True)
class Fate:
    """One kind of message."""

    kind: str
    sent: int = 0
    succeeded: int = 0
    dead_lettered: int = 0
    retried: int = 0
    reasons: set[str] = field(default_factory=set)
    how: str = ""  # cause, signal, and where it was


@dataclass(slots=True)
class Account:
    """Everything, at one instant."""

    sent: int
    succeeded: int
    dead_lettered: int
    left: int
    retried: int
    fates: dict[str, Fate]

    @property
    def closed(self) -> bool:
        """Every message came to its end."""
        return self.left == 0 and self.succeeded + self.dead_lettered == self.sent

    def line(self) -> str:
        """The last line of the demo, which scripts may read."""
        return (
            f"account: sent={self.sent} succeeded={self.succeeded} dead_lettered={self.dead_lettered} left={self.left}"
        )


_LABEL: Final = """CASE WHEN {m} ? 'dies' THEN 'ledger+kill' ELSE {m}->>'kind' END"""


def take_account(connection: psycopg.Connection[Any], sent: dict[str, int]) -> Account:
    """Count archives (successes are archived in the demo), dead letters, and what is left in the queues."""
    fates = {kind: Fate(kind, count) for kind, count in sent.items()}
    left = 0
    for queue in QUEUES:
        left += _one(connection, f"SELECT count(*) FROM pgmq.q_{queue}")  # noqa: S608 - our names
        label = _LABEL.format(m="message")
        archived = f"SELECT {label}, count(*), coalesce(sum(read_ct - 1), 0) FROM pgmq.a_{queue} GROUP BY 1"  # noqa: S608 - our names
        rows = connection.execute(archived).fetchall()
        for kind, count, retried in rows:
            fates[kind].succeeded += count
            fates[kind].retried += int(retried)
        for (letter,) in connection.execute(f"SELECT message FROM pgmq.q_{queue}_dlq").fetchall():  # noqa: S608 - our own names
            _add_letter(fates, letter)
    return Account(
        sent=sum(sent.values()),
        succeeded=sum(fate.succeeded for fate in fates.values()),
        dead_lettered=sum(fate.dead_lettered for fate in fates.values()),
        left=left,
        retried=sum(fate.retried for fate in fates.values()),
        fates=fates,
    )


def _one(connection: psycopg.Connection[Any], query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0


def _add_letter(fates: dict[str, Fate], letter: dict[str, Any]) -> None:
    fate = fates[letter["message"]["kind"]]
    fate.dead_lettered += 1
    fate.retried += int(letter["source"]["deliveries"]) - 1
    fate.reasons.add(letter["reason"])
    death, error = letter["death"], letter["error"]
    if death is not None:
        what = death["signal"] or f"exit code {death['exit_code']}"
        rss = f" at {death['max_rss_kb'] // 1024} MB" if death["cause"] in ("memory_limit", "oom") else ""
        fate.how = f"{what}{rss} {_where(death['stack'])}".rstrip()
    elif error is not None:
        fate.how = f"{error['type']}: {error['message']}"


def _where(stack: str) -> str:
    """The line of the demo's module that was running, from a faulthandler stack."""
    for line in stack.splitlines():
        if "demo_tasks.py" in line:
            _, _, place = line.partition('demo_tasks.py", line ')
            number, _, function = place.strip().partition(" in ")
            return f"in {function}, demo_tasks.py:{number}"
    return ""

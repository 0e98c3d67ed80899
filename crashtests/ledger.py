"""What really happened: the fsynced lines of handlers, business rows, the archive, dead letters, and what is left.

Nothing here trusts the supervisor's own words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from crashtests.ground import Session

__all__ = ["Acked", "Entry", "Letter", "Row", "Sent", "Truth", "read_ledger", "read_row", "read_truth"]

_OTHERS: Final = """
select coalesce(application_name, ''), state from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and application_name <> 'crashtests'
  and backend_type = 'client backend'
"""
_LOCKS: Final = """
select l.locktype, l.mode from pg_locks as l join pg_stat_activity as a using (pid)
where a.datname = current_database() and l.pid <> pg_backend_pid() and a.application_name <> 'crashtests'
  and a.backend_type = 'client backend' and (l.locktype = 'advisory' or l.mode like '%%Exclusive%%')
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """One message that was sent. `op` names it everywhere."""

    op: str
    queue: str
    msg_id: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line that a handler wrote. `what`: begin, half, effect, end."""

    op: str
    queue: str
    delivery: int
    attempt: int
    what: str
    pid: int
    at: float


@dataclass(frozen=True, slots=True)
class Acked:
    """One row of the archive: a message that was acknowledged, in its `read_ct`-th delivery."""

    op: str
    queue: str
    msg_id: int
    read_ct: int


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    op: str
    queue: str
    reason: str
    attempt: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Row:
    """A message's row in its queue at one instant; `None` in its place: it is gone."""

    visible: bool
    visible_in_s: float
    read_ct: int
    accounts: dict[str, Any]


@dataclass(slots=True)
class Truth:
    """Everything, when a scenario is over."""

    sent: list[Sent] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    torn: int = 0  # lines of the ledger that cannot be read
    business: Counter[str] = field(default_factory=Counter)
    acked: list[Acked] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    left: list[Sent] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    locks: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    exit_code: int | None = 0

    def of(self, op: str, what: str) -> list[Entry]:
        """Lines of one kind about one message, in the order in which they were written."""
        return [entry for entry in self.entries if entry.op == op and entry.what == what]


def read_ledger(path: Path) -> tuple[list[Entry], int]:
    """The lines, and how many are torn."""
    entries, torn = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entries.append(Entry(**json.loads(line)))
        except (ValueError, TypeError):
            torn += 1
    return entries, torn


def read_row(connection: Session, queue: str, msg_id: int) -> Row | None:
    """The row of one message now."""
    found = connection.execute(
        _on("select extract(epoch from vt - clock_timestamp())::float8, read_ct, headers from {}", f"q_{queue}")
        + sql.SQL(" where msg_id = %s"),
        [msg_id],
    ).fetchone()
    if found is None:
        return None
    visible_in_s, read_ct, headers = found
    accounts = headers.get("x-supervisor", {}) if isinstance(headers, dict) else {}
    return Row(visible_in_s <= 0, visible_in_s, read_ct, accounts)


def read_truth(connection: Session, ledger: Path, sent: Sequence[Sent], queues: Sequence[str]) -> Truth:
    """Read it all; sessions and locks are those of others than the harness."""
    entries, torn = read_ledger(ledger)
    truth = Truth(sent=list(sent), entries=entries, torn=torn)
    truth.business.update(op for (op,) in connection.execute("select op from crash_business"))
    for queue in queues:
        _read_queue(connection, queue, truth)
    truth.sessions = [f"{name} ({state})" for name, state in connection.execute(_OTHERS)]
    truth.locks = [f"{kind} {mode}" for kind, mode in connection.execute(_LOCKS)]
    return truth


def _read_queue(connection: Session, queue: str, truth: Truth) -> None:
    archive = connection.execute(_on("select msg_id, read_ct, message ->> 'op' from {} order by msg_id", f"a_{queue}"))
    truth.acked += [Acked(op, queue, msg_id, read_ct) for msg_id, read_ct, op in archive]
    live = connection.execute(_on("select msg_id, message ->> 'op' from {} order by msg_id", f"q_{queue}"))
    truth.left += [Sent(op, queue, msg_id) for msg_id, op in live]
    try:
        letters = connection.execute(_on("select message from {} order by msg_id", f"q_{queue}_dlq")).fetchall()
    except psycopg.errors.UndefinedTable:  # no supervisor has started yet
        return
    for (letter,) in letters:
        source = letter["source"]
        truth.letters.append(
            Letter(letter["message"]["op"], queue, letter["reason"], source["attempt"], source["deaths"])
        )


def _on(query: str, table: str) -> sql.Composed:
    return sql.SQL(query).format(sql.Identifier("pgmq", table))  # the harness's own texts

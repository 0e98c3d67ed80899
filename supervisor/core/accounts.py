"""Accounts of one message: what was refunded to it and what it is charged with, across restarts and hosts.

They live in the message's headers under `x-supervisor`, with the queue and msg_id that they belong to: a handler that
forwards headers, or a redrive, passes no debts on. A value that cannot be true counts as 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

MAX_DEADLOCKS_IN_A_ROW: Final = 10
_LIMIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Accounts:
    refunds: int = 0  # deliveries that do not count as attempts
    deaths: int = 0  # deaths charged
    early: int = 0  # deaths before the handler started that were refunded, at most max_deaths
    deadlocks: int = 0  # in a row, refunded, at most MAX_DEADLOCKS_IN_A_ROW
    corrected: bool = False  # the headers say something else, so that these must be written

    def refunded(self) -> Accounts:
        return replace(self, refunds=self.refunds + 1)

    def charged_death(self) -> Accounts:
        return replace(self, deaths=self.deaths + 1, deadlocks=0)

    def attempt(self, read_ct: int) -> int:
        """What handlers see as attempt: max(1, read_ct - refunds)."""
        return max(1, read_ct - self.refunds)

    def to_json(self, queue: str, msg_id: int) -> str:
        """The whole entry, absolute values: writing it twice is writing it once."""
        entry: dict[str, object] = {"queue": queue, "msg_id": msg_id, "refunds": self.refunds, "deaths": self.deaths}
        if self.early:
            entry["early"] = self.early
        if self.deadlocks:
            entry["deadlocks"] = self.deadlocks
        return json.dumps(entry, separators=(",", ":"))


CLEAN: Final = Accounts()


def parse_accounts(text: str | None, queue: str, msg_id: int, read_ct: int) -> Accounts:
    """Read an entry; foreign or malformed ones count as clean. Never raises."""
    if text is None:
        return CLEAN
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return CLEAN
    if not isinstance(entry, dict) or entry.get("queue") != queue:
        return CLEAN
    owner = entry.get("msg_id")
    if isinstance(owner, bool) or owner != msg_id:
        return CLEAN

    corrected = False

    def number(key: str, most: int) -> int:
        nonlocal corrected
        value = entry.get(key, 0)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
            return value
        corrected = True  # written down at the next chance
        return 0

    # Whatever was refunded or charged was delivered before: more than that is forged, and counts as nothing.
    before = max(0, min(read_ct - 1, _LIMIT))
    refunds, deaths = number("refunds", before), number("deaths", before)
    early, deadlocks = number("early", _LIMIT), number("deadlocks", MAX_DEADLOCKS_IN_A_ROW)
    return Accounts(refunds, deaths, early, deadlocks, corrected)

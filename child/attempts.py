"""Which attempt is this? In transactional mode the child claims, so the child counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

_LIMIT = 1_000_000


class Tally(NamedTuple):
    """Where a delivery stands."""

    attempt: int  # from 1, as in the contract: max(1, read_ct - refunds), and what is not written down yet
    deaths: int  # charged so far


def tally(*, read_ct: int, accounts: str | None, queue: str, msg_id: int, owed: Iterable[object]) -> Tally:
    """Count.

    `accounts`: our entry in the headers as JSON text; a foreign, malformed or forged one counts as none. `owed`: lists
    of msg_id, attempts and deaths, from the permit.
    """
    charges = [charge for charge in owed if isinstance(charge, list) and charge[0] == msg_id]
    extra: int = sum(int(charge[1]) for charge in charges)
    died: int = sum(int(charge[2]) for charge in charges)
    entry = _entry(accounts, queue, msg_id)
    before = max(0, min(read_ct - 1, _LIMIT))
    attempt = max(1, read_ct + extra - _number(entry, "refunds", before))
    return Tally(attempt, _number(entry, "deaths", before) + died)


def _entry(accounts: str | None, queue: str, msg_id: int) -> dict[str, Any]:
    if accounts is None:
        return {}
    try:
        entry = json.loads(accounts)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(entry, dict) or entry.get("queue") != queue:
        return {}
    owner = entry.get("msg_id")
    return entry if owner == msg_id and not isinstance(owner, bool) else {}


def _number(entry: dict[str, Any], key: str, most: int) -> int:
    """More than was delivered before is forged, and counts as nothing."""
    value = entry.get(key, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else 0

"""Which attempt is this? In transactional mode the child claims, so the child counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

_LIMIT = 1_000_000


def count_attempt(*, read_ct: int, accounts: str | None, queue: str, msg_id: int, owed: Iterable[object]) -> int:
    """What handlers see as attempt: max(1, read_ct - refunds), with what is charged and not written down yet.

    `accounts`: our entry in the headers as JSON text; a foreign, malformed or forged one counts as none. `owed`: pairs
    of msg_id and attempts, from the permit.
    """
    extra: int = sum(int(pair[1]) for pair in owed if isinstance(pair, list) and pair[0] == msg_id)
    return max(1, read_ct + extra - _refunds(accounts, queue, msg_id, read_ct))


def _refunds(accounts: str | None, queue: str, msg_id: int, read_ct: int) -> int:
    if accounts is None:
        return 0
    try:
        entry = json.loads(accounts)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(entry, dict) or entry.get("queue") != queue:
        return 0
    owner, refunds = entry.get("msg_id"), entry.get("refunds", 0)
    if isinstance(owner, bool) or owner != msg_id or isinstance(refunds, bool) or not isinstance(refunds, int):
        return 0
    before = max(0, min(read_ct - 1, _LIMIT))
    return refunds if 0 <= refunds <= before else 0  # more than was delivered before is forged, and counts as nothing

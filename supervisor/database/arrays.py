"""Parameters as arrays: PostgreSQL reads '{1,2,3}' faster than the driver can adapt a list of numbers."""

from __future__ import annotations

from collections.abc import Iterable

from shared.pgmq.records import Fence

__all__ = ["fences", "integers"]


def integers(values: Iterable[int]) -> str:
    """Write an array of integers as PostgreSQL reads it."""
    return "{" + ",".join(map(str, values)) + "}"


def fences(wanted: Iterable[Fence]) -> dict[str, object]:
    """Write fences as the three arrays that the statements take."""
    ids, read_cts, read_us = zip(*wanted, strict=True)
    return {"ids": integers(ids), "cts": integers(read_cts), "ats": integers(read_us)}

"""Transactional handlers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

import psycopg


def book(message: Any, tx: Any) -> None:
    """Write one business row."""
    tx.execute("insert into bookings (msg_id) values (%s)", (message.id,))


def execute(message: Any, tx: Any) -> Any:
    """Book, then run the statements of the body; `result` is returned."""
    book(message, tx)
    scope: dict[str, Any] = {"message": message, "tx": tx, "psycopg": psycopg, "contextlib": contextlib, "result": None}
    scope |= {"os": os, "time": time}
    exec(message.body, scope)  # noqa: S102 - the test's own text
    return scope["result"]


async def book_async(message: Any, tx: Any) -> Any:
    """Write a row, look at it, send a message; raise when told."""
    await tx.execute("insert into bookings (msg_id) values (%s)", (message.id,))
    await tx.executemany("insert into bookings (msg_id) values (%s)", [(-1,), (-2,)])
    async with tx.cursor() as cursor:
        await cursor.execute("select count(*) from bookings")
        (count,) = await cursor.fetchone()
    await asyncio.sleep(0)
    await tx.send("orders_next", {"count": count})
    if message.body == "raise":
        raise ValueError("asked to")
    if message.body == "commit":
        await tx.connection.commit()

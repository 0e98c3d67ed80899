"""The child's end of its database session: what is ours is said in whole sentences, past the driver's connection.

The handler shares that connection and may do to it what it likes: row factories, adapters, prepared statements, an
encoding of its own. Nothing of this reaches what is said here, which goes to libpq as text, several statements at
once, and is taken apart by whoever asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, Escaping, ExecStatus, abc

Row = tuple[Any, ...]
Hear = Callable[[int, abc.PGresult], None]

_PLACE: Final = re.compile(rb"%\((\w+)\)s")
_GOOD: Final = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.EMPTY_QUERY})
_COPYING: Final = frozenset({ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH})


def say(connection: psycopg.Connection[Row], text: bytes, hear: Hear | None = None) -> list[abc.PGresult]:
    """Say one or more statements in one message; one result for each.

    `hear` is called with the number (from 0) and the result of each as it comes in, before the next one is waited for.
    Raises the `psycopg.Error` of the statement that failed; the server has then ignored those that follow it, and
    `OperationalError` where the connection ended.
    """
    with connection.lock:  # a thread that a handler left behind may be at it; libpq serves one at a time
        pgconn = connection.pgconn
        pgconn.send_query(text)
        results: list[abc.PGresult] = []
        error: psycopg.Error | None = None
        while (result := pgconn.get_result()) is not None:
            status = result.status
            if status in _GOOD and error is None:
                results.append(result)
                if hear is not None:
                    hear(len(results) - 1, result)
            elif status in _COPYING:
                raise psycopg.OperationalError("the connection is in the middle of a COPY")
            else:
                error = error or _error_of(pgconn, result)
    if error is not None:
        raise error
    return results


def _error_of(pgconn: abc.PGconn, result: abc.PGresult) -> psycopg.Error:
    error = error_from_result(result, "utf-8")
    if error.sqlstate is None and pgconn.status != ConnStatus.OK:
        return psycopg.OperationalError(str(error))
    return error


def fill(connection: psycopg.Connection[Row], statement: bytes, values: Mapping[str, object]) -> bytes:
    """Put values into a statement's `%(name)s`, as literals."""
    escaping = Escaping(connection.pgconn)
    pieces, names = _taken_apart(statement)
    filled = [pieces[0]]
    for name, piece in zip(names, pieces[1:], strict=True):
        filled += [_literal(escaping, values[name]), piece]
    return b"".join(filled)


@lru_cache(maxsize=256)
def _taken_apart(statement: bytes) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
    parts = _PLACE.split(statement)
    return tuple(part.replace(b"%%", b"%") for part in parts[::2]), tuple(name.decode() for name in parts[1::2])


def _literal(escaping: abc.Escaping, value: object) -> bytes:
    if value is None:
        return b"null"
    if isinstance(value, int):
        return b"%d" % value if value >= 0 else b"(%d)" % value
    if isinstance(value, str):
        return escaping.escape_literal(value.encode())
    raise TypeError(f"no literal for {type(value).__name__}")

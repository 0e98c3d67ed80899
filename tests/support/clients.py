"""Both faces of the client behind one: tests are written once, awaited, and run against each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

from shared.pgmq.aio import AsyncClient
from shared.pgmq.blocking import Client

__all__ = ["FACES", "open_client", "until"]

FACES: Final = ("blocking", "asyncio")
_threads = ThreadPoolExecutor(64, thread_name_prefix="blocking-client")


class _Awaited:
    """The blocking client (or a transaction of it) with every call in a thread, so that it can be awaited."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _in_thread(lambda: value(*args, **kwargs))

        return call

    def transaction(self, **options: Any) -> _Awaited:
        return _Awaited(self._inner.transaction(**options))

    async def __aenter__(self) -> Self:
        await _in_thread(self._inner.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        await _in_thread(lambda: self._inner.__exit__(*error))


async def _in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def open_client(face: str, dsn: str, **options: Any) -> Any:
    """Make a client of a face; its methods are awaited, `async with` closes it."""
    return AsyncClient(dsn, **options) if face == "asyncio" else _Awaited(Client(dsn, **options))


async def until(look: Callable[[], Any], *, timeout_s: float = 90.0, what: str = "it") -> None:
    """Look again and again until the answer is true, and let others work meanwhile; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    never = asyncio.Event()
    while not look():
        assert time.monotonic() < deadline, f"{what} did not come to pass within {timeout_s:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await never.wait()

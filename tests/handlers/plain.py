"""Handlers that behave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def succeed(message: Any) -> None:
    """Do nothing."""


def echo(message: Any) -> None:
    """Put what the message is into the reason of a dead letter, which the test can read."""
    parts = [message.id, message.queue, message.attempt, message.deliveries, message.enqueued_at.isoformat()]
    raise message.dead_letter(repr([*parts, message.body, message.raw, message.headers]))


def evaluate(message: Any) -> Any:
    """Return what an expression gives; `message` is in scope."""
    return eval(message.body, {"message": message, "os": os, "sys": sys, "signal": signal})  # noqa: S307 - the test's own text


def execute(message: Any) -> Any:
    """Run statements; `result` is returned."""
    scope: dict[str, Any] = {"message": message, "result": None}
    exec(message.body, scope)  # noqa: S102 - the test's own text
    return scope["result"]


def show(message: Any) -> Any:
    """Reject with the repr of an expression as the reason."""
    scope = {"message": message, "os": os, "sys": sys, "signal": signal}
    return message.dead_letter(repr(eval(message.body, scope)))  # noqa: S307 - the test's own text


def wait_for_stop(message: Any) -> None:
    """Work until a stop is asked for."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        message.raise_if_stopped()
        time.sleep(0.005)


def wait_for_stop_in_thread(message: Any) -> Any:
    """Look for the stop from another thread."""
    seen: list[bool] = []

    def look() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not message.stop_requested:
            time.sleep(0.005)
        seen.append(message.stop_requested)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return message.dead_letter(str(seen))


def sleep(message: Any) -> None:
    """Sleep for the seconds that the body says."""
    time.sleep(message.body)


def wait_for_file(message: Any) -> None:
    """Work until a file appears."""
    deadline = time.monotonic() + 20
    while not Path(message.body).exists() and time.monotonic() < deadline:
        time.sleep(0.005)


async def async_succeed(message: Any) -> None:
    """Give the loop a turn."""
    await asyncio.sleep(0)


async def async_raise(message: Any) -> Any:
    """Raise, or return, what the body says."""
    await asyncio.sleep(0)
    match message.body:
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "timeout":
            async with asyncio.timeout(0.001):
                await asyncio.sleep(20)
        case "retry":
            return message.retry("2s")
        case "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_reject(message))
        case "stop loop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(20)
        case "loop":
            raise message.dead_letter(str(id(asyncio.get_running_loop())))
    return None


async def _reject(message: Any) -> None:
    raise message.dead_letter("from a task")


class Callable_:  # noqa: N801 - only its instance matters
    """An object with `__call__`."""

    def __call__(self, message: Any) -> None:
        """Succeed."""


instance = Callable_()


def returns_coroutine(message: Any) -> Any:
    """A plain function around an async one."""
    return async_succeed(message)

"""Waiting for something that another process does, where there is nothing to be woken by."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_never = threading.Event()


def eventually(look: Callable[[], Result], *, timeout_s: float = 90.0, what: str = "it") -> Result:
    """Look again and again until the answer is true, and return it; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"{what} did not come to pass within {timeout_s:g} s"
        _never.wait(0.01)

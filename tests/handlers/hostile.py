"""Handlers that do what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn


class Nasty(Exception):
    """Whatever one looks at fails."""

    def __str__(self) -> str:
        """Raise."""
        raise ValueError("no text")

    __repr__ = __str__

    @property
    def permanent(self) -> bool:
        """Exit."""
        sys.exit(1)

    @property
    def sqlstate(self) -> str:
        """Exit."""
        sys.exit(1)


class Permanent(Exception):
    """Says so."""

    permanent = True


def _ring() -> NoReturn:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def _deep(level: int) -> int:
    return _deep(level + 1) + 1


def fail(message: Any) -> Any:  # noqa: C901, PLR0912 - a table of failures
    """Fail in the way that the body names."""
    match message.body:
        case "value":
            raise ValueError("bad value")
        case "exit":
            sys.exit(0)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "timeout":
            raise TimeoutError
        case "pipe":
            raise BrokenPipeError
        case "eof":
            raise EOFError
        case "generator exit":
            raise GeneratorExit
        case "base":
            raise BaseException("base")  # noqa: TRY002 - the point
        case "stopped":
            message.raise_if_stopped.__globals__["Stopped"]("not asked for")
            raise message.raise_if_stopped.__globals__["Stopped"]("not asked for")
        case "nasty":
            raise Nasty
        case "permanent":
            raise Permanent("for good")
        case "ring":
            _ring()
        case "group":
            raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
        case "recursion":
            return _deep(0)
        case "memory":
            raise MemoryError
        case "long":
            raise ValueError("\x00\ud800x" * 4_000_000)
        case "escapes":
            raise ValueError("\x01" * 65_536)
        case "swallowed verdict":
            with contextlib.suppress(Exception):
                raise message.dead_letter("swallowed")
    return None


def fork_and_return(message: Any) -> None:
    """Both the process and its copy return; the copy prints what is still in its buffer if it is let."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)


def fork_and_raise(message: Any) -> None:
    """Both raise."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    raise ValueError("from the copy too" if pid == 0 else "original")


def close_streams(message: Any) -> None:
    """Close what print writes to."""
    sys.stdout.close()
    sys.stderr.close()


def replace_streams(message: Any) -> None:
    """Put an object without flush in the place of stdout."""
    sys.stdout = 7  # type: ignore[assignment]


def say(message: Any) -> None:
    """Print."""
    print("still here", message.id)


def print_in_c(message: Any) -> None:
    """Print through C stdio, without a newline, and sleep."""
    ctypes.CDLL(None).printf(b"from C")
    if message.body:
        time.sleep(message.body)


def close_descriptors(message: Any) -> None:
    """Close everything that is open, ours too, and open something else."""
    os.closerange(3, 1025)
    pair = socket.socketpair()
    pair[0].setblocking(False)
    globals()["kept"] = pair


def write_garbage(message: Any) -> None:
    """Write random bytes to every open descriptor."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.write(int(name), b"\xff" * 64)


def own_signals(message: Any) -> None:
    """Leave signal functions behind that raise."""

    def leave(_number: int, _frame: object) -> None:
        sys.exit(9)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGALRM, leave)
    if message.body:
        signal.setitimer(signal.ITIMER_REAL, message.body)


def block_signals(message: Any) -> None:
    """Block every signal and stay."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    time.sleep(20)


def hold_the_interpreter(message: Any) -> None:
    """Sleep in C without giving up the interpreter."""
    ctypes.PyDLL(None).usleep(20_000_000)


def crash(message: Any) -> None:
    """Read address 0."""
    ctypes.string_at(0)


def leave_threads(message: Any) -> None:
    """Leave a thread that never ends, and is no daemon."""
    threading.Thread(target=time.sleep, args=(600,)).start()


def read_everything(message: Any) -> None:
    """Read stdin, which is empty."""
    assert sys.stdin.read() == ""


async def stubborn(message: Any) -> None:
    """Ignore cancellation once."""
    try:
        await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)

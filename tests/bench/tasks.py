"""Handlers of the benchmarks."""

import os
import signal
import socket
import time

_PORT = int(os.environ.get("BENCH_PORT", "0"))
_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def noop(message):
    """Nothing."""


def noop_tx(message, tx):
    """Nothing, in a transaction."""


def report(message):
    """Tell when the handler started (CLOCK_MONOTONIC is the same in all processes)."""
    _socket.sendto(str(time.monotonic_ns()).encode(), ("127.0.0.1", _PORT))


def two_ms(message):
    """Two milliseconds."""
    time.sleep(0.002)


def ten_ms(message):
    """Ten milliseconds; a body that is true kills the child."""
    time.sleep(0.01)
    if message.body:
        os.kill(os.getpid(), signal.SIGKILL)


def stamp(message):
    """Tell pid and time of start, then end: for the time from a death to the next start."""
    _socket.sendto(f"{os.getpid()} {time.monotonic_ns()}".encode(), ("127.0.0.1", _PORT))
    if message.body:
        os.kill(os.getpid(), signal.SIGKILL)

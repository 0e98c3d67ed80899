"""The demo's handlers: a plain module that imports nothing of ours, as yours would be.

Do not copy the bad ones.
"""

import ctypes
import os
import re
import signal
import subprocess
import time


class Refused(Exception):
    """An error that says of itself that trying again is no use."""

    permanent = True


def handle(message):
    """Do what the message says."""
    KINDS[message.body["kind"]](message)


def good(message):
    """Nothing to do."""


def slow(message):
    """Takes a quarter of a second."""
    time.sleep(0.25)


def flaky(message):
    """Works at the second attempt."""
    if message.attempt == 1:
        raise ConnectionError("the service downstream did not answer")


def rejected(message):
    """Says that it does not want this message."""
    raise message.dead_letter("the customer does not exist any more")


def refused(message):
    """Fails for good."""
    raise Refused("no such currency")


def failing(message):
    """Fails at every attempt."""
    raise ValueError(f"cannot parse the amount of order {message.body['n']}")


def segfault(message):
    """Reads address 0 in C."""
    ctypes.string_at(0)


def regex(message):
    """Backtracks for years inside C code that holds the GIL."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def deaf(message):
    """Ignores TERM and sleeps."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def hungry(message):
    """Allocates without end."""
    hoard = []
    while True:
        hoard.append(b"x" * (16 << 20))
        time.sleep(0.01)


def litter(message):
    """Leaves a daemon behind, in a session of its own, and returns."""
    daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    with open(os.environ["DEMO_DAEMONS"], "a") as file:
        file.write(f"{daemon.pid}\n")


KINDS = {
    task.__name__: task
    for task in (good, slow, flaky, rejected, refused, failing, segfault, regex, deaf, hungry, litter)
}


def book(message, tx):
    """Transactional: the row and the acknowledgement are both there or both absent."""
    body = message.body
    tx.execute("INSERT INTO demo_ledger (n, amount) VALUES (%s, %s)", (body["n"], body["amount"]))
    if body.get("dies") and message.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)

"""The harness's own handlers: a plain module that imports nothing of ours.

Every external effect is one line in a ledger, appended and fsynced before the handler goes on: what stands there has
happened, whatever is killed next. The body says what to do: {"op": its name, "sleep_ms": ..., "ends": how its first
attempt ends ("raise", "exit", "kill"), "leaves": True to leave a daemon behind, "door": True to stand still half way}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from typing import Any

LEDGER = os.environ["CRASHTESTS_LEDGER"]


def note(message: Any, what: str) -> None:
    """Append one fsynced line."""
    entry = {
        "op": message.body["op"],
        "queue": message.queue,
        "delivery": message.deliveries,
        "attempt": message.attempt,
        "what": what,
        "pid": os.getpid(),
        "at": time.clock_gettime(time.CLOCK_BOOTTIME),
    }
    fd = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(entry).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


def door(message: Any) -> None:
    """Stand still in the middle of the work, where a harness listens: the same words as at a sync point."""
    path, token = os.environ.get("PGMQ_SUPERVISOR_SYNC"), os.environ.get("PGMQ_SUPERVISOR_SYNC_TOKEN")
    if not path or not token or not message.body.get("door"):
        return
    question = {"process": "handler", "point": "handler.middle", "hit": 1, "pid": os.getpid(), "token": token}
    question["ids"] = {"msg_id": message.id}
    try:
        with socket.socket(socket.AF_UNIX) as meeting:
            meeting.connect(path)
            meeting.sendall(json.dumps(question).encode() + b"\n")
            meeting.recv(4096)
    except OSError:
        return


def misbehave(message: Any) -> None:
    """End the first attempt as the body asks."""
    if message.attempt > 1:
        return
    match message.body.get("ends"):
        case "raise":
            raise ConnectionError("as the message asks")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def work(message: Any) -> None:
    """The time that it takes, and what it leaves behind."""
    if message.body.get("leaves"):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(message.body.get("sleep_ms", 0) / 1000)


def handle(message: Any) -> None:
    """Regular: an effect in two halves, and a door between them."""
    note(message, "begin")
    note(message, "half")
    door(message)
    work(message)
    misbehave(message)
    note(message, "effect")
    note(message, "end")


def book(message: Any, tx: Any) -> None:
    """Transactional: a business row with a unique operation id, and an external effect."""
    note(message, "begin")
    note(message, "half")
    tx.execute(
        "insert into crash_business (op, delivery, pid) values (%s, %s, %s)",
        [message.body["op"], message.deliveries, os.getpid()],
    )
    door(message)
    work(message)
    misbehave(message)
    note(message, "effect")
    note(message, "end")

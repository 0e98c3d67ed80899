"""Processes that a handler started and forgot: it has let go of its `subprocess.Popen`, so nobody will wait for them.

What a message started ends with it. An orphan is found and swept by the parent; a process that is still our child looks
like one of a pool that the handler keeps for its next message. The standard library tells them apart: a `Popen` that is
thrown away while its process runs is put on a list, so that it can be reaped one day. Whoever keeps a helper keeps its
object, and it stays.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from shared.wire.frames import Kind

if TYPE_CHECKING:
    import subprocess

    from child.channel import Channel

_REAP_LIMIT_S = 0.1
_LOOK_AGAIN_S = 0.001
_modules = sys.modules


class Abandoned:
    """Ends them after each message. What the handler's module started when it was imported belongs to the module."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._spared = {process.pid for process in _thrown_away()}

    def end(self) -> None:
        """Kill and reap what the message left behind, and say how many. Costs next to nothing when there is nothing."""
        module = _modules.get("subprocess")
        if module is not None and getattr(module, "_active", None):
            self._end()

    def _end(self) -> None:
        try:
            killed = [process for process in _thrown_away() if process.pid not in self._spared and _kill(process)]
            give_up = time.monotonic() + _REAP_LIMIT_S
            while any(process.poll() is None for process in killed) and time.monotonic() < give_up:
                time.sleep(_LOOK_AGAIN_S)
        except BaseException:  # noqa: BLE001 - a handler may have changed the library, or left an alarm that goes off
            return
        if killed:
            self._channel.say(Kind.SWEPT, self._channel.seq, {"count": len(killed)})


def _thrown_away() -> list[subprocess.Popen[bytes]]:
    return list(getattr(_modules.get("subprocess"), "_active", None) or ())


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Not reaped, so its number is still its own, and so is that of its group."""
    if process.poll() is not None:
        return False
    if os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    return True

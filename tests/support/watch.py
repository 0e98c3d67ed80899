"""Looking at a running service from outside: its HTTP doors, its metrics, its processor time."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from tests.support.service import Service
from tests.support.waiting import eventually

HTTP: Final = "[http]\nport = 0\n"
"""To be put into a configuration: any free port, which the log names."""

_PREFIX: Final = "pgmq_supervisor_"


class Watch:
    """The HTTP side of a service that was started with `HTTP` in its configuration."""

    def __init__(self, service: Service, *, start: int = 1) -> None:
        """`start`: its which start, as one log has them all."""

        def ports() -> list[int]:
            return [json.loads(line)["port"] for line in service.log.splitlines() if '"event":"http"' in line]

        try:
            eventually(lambda: len(ports()) >= start or service.process.poll() is not None, timeout_s=60, what="HTTP")
        except AssertionError as error:
            error.add_note(f"its log:\n{service.log[-4000:]}")
            raise
        assert len(ports()) >= start, service.log[-4000:]
        self.port = ports()[start - 1]
        self._base = f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        """Ask; gives status and text, of refusals too."""
        try:
            with urllib.request.urlopen(self._base + path, timeout=20) as answer:  # noqa: S310 - our own server
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of a metric that have these labels; 0 where there is none."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            found = re.fullmatch(rf"{_PREFIX}{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def status(self) -> dict[str, Any]:
        """The status document."""
        found: dict[str, Any] = json.loads(self.get("/api/status")[1])
        return found

    @property
    def is_ready(self) -> bool:
        """What /readyz says."""
        return self.get("/readyz")[0] == 200

    @property
    def is_live(self) -> bool:
        """What /livez says."""
        return self.get("/livez")[0] == 200

    def until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait for /readyz."""
        eventually(lambda: self.is_ready, timeout_s=timeout_s, what="a ready service")


def processor_s(pid: int) -> float:
    """Processor time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pass_time(seconds: float) -> None:
    """Let time pass where the passing of time itself is what is tested: an outage of so many seconds."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= until, timeout_s=seconds + 60, what="the time")

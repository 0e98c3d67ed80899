"""Runs a user's probe in a process of its own: `probe_main.py MODULE:FUNCTION APP_DIR SOCKET_FD`.

One JSON line in: {"body", "operation_id", "msg_id", "dsn"}; one JSON line out: {"counts": {...}} or {"error": text}.
The probe is called with those of them that it names, and with `connection` where it wants a session in autocommit; a
first parameter with another name gets the body. Imports nothing of ours.
"""

from __future__ import annotations

import importlib
import inspect
import json
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any


def load(reference: str) -> Callable[..., Any]:
    """The function."""
    module, _, path = reference.partition(":")
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    found: Callable[..., Any] = target
    return found


class Probe:
    """One function, and a session for it where it wants one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Look at its parameters."""
        parameters = inspect.signature(function).parameters.items()
        self.function = function
        self.named = [name for name, found in parameters if found.kind is found.KEYWORD_ONLY]
        self.positional = [
            name for name, found in parameters if found.kind in (found.POSITIONAL_ONLY, found.POSITIONAL_OR_KEYWORD)
        ]
        self.session: Any = None
        self.dsn = ""

    def wants(self) -> list[str]:
        """Names of what it is given."""
        return self.positional + self.named

    def call(self, given: dict[str, Any]) -> Any:
        """Call it with what it names."""
        values = {**given, "message": given["body"]}
        if {"conn", "connection"} & set(self.wants()):
            values["conn"] = values["connection"] = self.connect(given["dsn"])
        arguments = []
        for place, name in enumerate(self.positional):
            if name in values:
                arguments.append(values[name])
            elif place == 0:
                arguments.append(given["body"])
            else:
                break
        return self.function(*arguments, **{name: values[name] for name in self.named if name in values})

    def connect(self, dsn: str) -> Any:
        """One session for each database."""
        import psycopg  # noqa: PLC0415 - only for probes that look into the database

        if self.session is None or self.session.closed or self.session.broken or self.dsn != dsn:
            if self.session is not None:
                self.session.close()
            self.session = psycopg.connect(dsn, autocommit=True, application_name="crashtests")
            self.dsn = dsn
        return self.session


def counts_of(found: Any) -> dict[str, int]:
    """Any of what a probe may return, as counts by name."""
    if isinstance(found, dict):
        return {str(name): int(count) for name, count in found.items()}
    if isinstance(found, int | float):
        return {"effects": int(found)}
    if hasattr(found, "__len__"):
        return {"effects": len(found)}
    raise TypeError(f"a probe returns a number, a list, or a dict of numbers, not {found!r}")


def main() -> None:
    """Answer until the harness closes its end."""
    reference, app_dir, fd = sys.argv[1:4]
    sys.path[0] = app_dir
    lines = socket.socket(fileno=int(fd)).makefile("rwb")

    def say(what: dict[str, Any]) -> None:
        lines.write(json.dumps(what).encode() + b"\n")
        lines.flush()

    try:
        probe = Probe(load(reference))
    except BaseException:  # noqa: BLE001 - a module may raise or exit as it likes while it is imported
        say({"error": traceback.format_exc()})
        return
    say({"wants": probe.wants()})
    for line in lines:
        try:
            say({"counts": counts_of(probe.call(json.loads(line)))})
        except Exception:  # noqa: BLE001 - the boundary of somebody else's function
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()

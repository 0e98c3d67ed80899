"""Runs a user's probe in a process of its own: `probe_main.py MODULE:FUNCTION APP_DIR SOCKET_FD`.

One JSON line in: {"body", "operation_id", "msg_id", "dsn"}; one JSON line out: {"counts": {...}} or {"error": text}.
The probe is called with those of them that it names, and with `connection` where it wants a session in autocommit; a
first parameter with another name gets the body. Imports nothing of ours.
"""

import importlib
import inspect
import json
import socket
import sys
import traceback


def load(reference):
    """The function."""
    module, _, path = reference.partition(":")
    target = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    return target


class Probe:
    """One function, and a session for it where it wants one."""

    def __init__(self, function):
        """Look at its parameters."""
        self.function = function
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(function)
        self.positional = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
        self.named = [
            name for name, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
        ]
        self.session = None

    def wants(self):
        """Names of what it is given."""
        return self.positional + self.named

    def call(self, given):
        """Call it with what it names."""
        values = {**given, "message": given["body"], "conn": None, "connection": None}
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

    def connect(self, dsn):
        """One session for each database."""
        import psycopg

        if self.session is None or self.session.closed or self.session.broken or self.dsn != dsn:
            if self.session is not None:
                self.session.close()
            self.session = psycopg.connect(dsn, autocommit=True, application_name="crashtests")
            self.dsn = dsn
        return self.session


def counts_of(found):
    """Any of what a probe may return, as counts by name."""
    if isinstance(found, dict):
        return {str(name): int(count) for name, count in found.items()}
    if isinstance(found, (int, float)):
        return {"effects": int(found)}
    if hasattr(found, "__len__"):
        return {"effects": len(found)}
    raise TypeError(f"a probe returns a number, a list, or a dict of numbers, not {found!r}")


def main():
    """Answer until the harness closes its end."""
    reference, app_dir, fd = sys.argv[1:4]
    sys.path[0] = app_dir
    lines = socket.socket(fileno=int(fd)).makefile("rwb")

    def say(what):
        lines.write(json.dumps(what).encode() + b"\n")
        lines.flush()

    try:
        probe = Probe(load(reference))
    except BaseException:
        say({"error": traceback.format_exc()})
        return
    say({"wants": probe.wants()})
    for line in lines:
        try:
            say({"counts": counts_of(probe.call(json.loads(line)))})
        except Exception:
            say({"error": traceback.format_exc()})


main()

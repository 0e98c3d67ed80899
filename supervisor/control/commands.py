"""`status`, `top`, `pause`, `resume`, `cancel`: what they do. Each returns its exit code.

Only the place of the socket is read from the configuration, so that a running supervisor can be steered while somebody
is half way through editing its file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.config.sources import Overrides, gather
from supervisor.control.client import Connection, ControlError, ask, choose_socket


def status(overrides: Overrides, *, as_json: bool = False) -> int:
    """Show everything once."""
    return _reported(lambda: _show_status(_socket(overrides), as_json=as_json))


def top(overrides: Overrides, *, as_json: bool = False) -> int:
    """Show everything until interrupted; without a terminal, once."""

    def show() -> int:
        path = _socket(overrides)
        if as_json or not sys.stdout.isatty():
            return _show_status(path, as_json=as_json)
        from supervisor.control.live import show_live  # noqa: PLC0415 - rich is only needed here

        connection = Connection(path)
        try:
            return show_live(lambda: connection.ask("status"))
        finally:
            connection.close()

    return _reported(show)


def pause(overrides: Overrides, *, queue: str, as_json: bool = False) -> int:
    """Stop claiming from a queue."""
    return _act(overrides, "pause", "paused", queue=queue, as_json=as_json)


def resume(overrides: Overrides, *, queue: str, as_json: bool = False) -> int:
    """Claim from a queue again."""
    return _act(overrides, "resume", "resumed", queue=queue, as_json=as_json)


def cancel(overrides: Overrides, *, queue: str, msg_id: int, as_json: bool = False) -> int:
    """Cancel a running message."""
    return _act(overrides, "cancel", "cancelling", queue=queue, as_json=as_json, msg_id=msg_id)


def _act(overrides: Overrides, command: str, done: str, *, queue: str, as_json: bool, **fields: object) -> int:
    """Ask for one change, and say what came of it."""

    def act() -> int:
        result = ask(_socket(overrides), command, queue=queue, **fields)
        if as_json:
            print(json.dumps(result, indent=2))
        else:
            what = f" message {fields['msg_id']}" if "msg_id" in fields else ""
            print(f"{queue}: {done}{what}")
            if result.get("note"):
                print(f"note: {_printable(result['note'])}", file=sys.stderr)
        return 0

    return _reported(act)


def _show_status(path: Path, *, as_json: bool) -> int:
    document = ask(path, "status")
    if as_json:
        print(json.dumps(document, indent=2))
        return 0
    from supervisor.control.live import print_once  # noqa: PLC0415 - rich is only needed here

    print_once(document)
    return 0


def _socket(overrides: Overrides) -> Path:
    """Decide whom to ask."""
    tree = gather(overrides, os.environ, Path.cwd())
    if overrides.config is not None and tree.file is not None and not tree.file.exists():
        raise ControlError(f"there is no configuration file {overrides.config}", exit_code=2)
    configured: Any = tree.get(("control", "socket"))
    return choose_socket(
        socket_path=overrides.socket,
        configured=str(configured) if configured else None,
        config_path=tree.file,
        environ=os.environ,
    )


def _reported(carry_out: Callable[[], int]) -> int:
    """Turn expected failures into a line on stderr and an exit code."""
    try:
        return carry_out()
    except ControlError as error:
        print(f"error: {_printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` is content; nothing more is flushed to it
        return 0
    except KeyboardInterrupt:
        return 130


def _printable(text: object) -> str:
    """Escape what could steer a terminal; line ends stay."""
    return "".join(char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in str(text))

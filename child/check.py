"""`check` imports a handler in a throw-away process: what an import prints, raises or exits with harms nobody."""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import Any, NoReturn

from child.imports import hand_over_imports
from child.loader import POSITIONALS, LoadError, load_handler
from child.process import die_with_parent, resident_kb
from shared.text import clean_text


def check(reference: str, mode: str, app_dir: str, fd: str, *, root: str, foreign: dict[str, ModuleType]) -> NoReturn:
    """Write {"ok", "kind", "error", "traceback", "rss_kb"} as one line to descriptor `fd`, and end."""
    die_with_parent()
    number = int(fd)
    os.set_inheritable(number, False)
    answer: dict[str, Any] = {"ok": True, "kind": None, "error": None, "traceback": None}
    hand_over_imports(root=root, app_dir=app_dir, foreign=foreign)
    try:
        if mode not in POSITIONALS:
            raise LoadError("signature", f"mode {mode!r} is none of {', '.join(POSITIONALS)}")
        load_handler(reference, mode)
    except LoadError as error:
        answer = {
            "ok": False,
            "kind": error.kind,
            "error": clean_text(error.error),
            "traceback": clean_text(error.traceback),
        }
    answer["rss_kb"] = resident_kb()
    _write_all(number, json.dumps(answer).encode("ascii") + b"\n")
    os._exit(0 if answer["ok"] else 1)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

"""How a handler ended, as the meta of a RESULT frame. Pure but for reading the exception, and never raises.

A handler's exception is hostile until proven otherwise: its `__str__` may raise, its attributes may exit, its causes
may form a ring, and memory may be what ran out. Every look at one stands behind a boundary of its own.
"""

from __future__ import annotations

import importlib
import os
import traceback as tracebacks
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, Final, TypedDict

from child.verdicts import InvalidMessage, Stopped, Verdict
from shared.text import TEXT_LIMIT_BYTES, clean_text

Meta = dict[str, Any]


class ErrorFields(TypedDict):
    """`ErrorInfo` of the core, as it travels."""

    type: str
    message: str
    traceback: str


_MAX_CHAIN: Final = 32
_UNRUN: Final = (GeneratorType, AsyncGeneratorType, CoroutineType)
# By file, as an application may have a package that is called like ours.
_NOT_SHOWN: Final = (os.path.dirname(__file__) + "/", "<frozen importlib", os.path.dirname(importlib.__file__) + "/")
_SQLSTATE_LENGTH: Final = 5


def of_return(returned: object, ack: str | None) -> Meta | None:
    """What a return value means. None: a plain success. Any value that is no verdict is a success.

    But for code that nobody has run: a generator, or a coroutine that was not awaited. Work that did not happen must
    not be acknowledged.
    """
    if type(returned) in _UNRUN:
        what = type(returned).__name__.replace("_", " ")
        return failure("NothingRun", f"the handler returned a {what}, which nobody runs: a yield or a missing await?")
    if issubclass(type(returned), Verdict):
        return dict(returned.meta)  # type: ignore[attr-defined] # isinstance would ask a hostile __class__
    return {"kind": "success", "ack": ack} if ack is not None else None


def of_exception(error: BaseException, *, stopping: bool, with_sqlstate: bool = False) -> Meta:
    """What a raised exception means. `stopping`: a stop was asked for, so that `Stopped` is believed."""
    try:
        leaf = _only_leaf(error)
        kind = type(leaf)
        if issubclass(kind, Verdict):
            return dict(leaf.meta)  # type: ignore[attr-defined] # see of_return
        fields = describe(error, without_our_frames(error))
        if issubclass(kind, InvalidMessage):
            return {"kind": "invalid_message", "error": fields}
        if issubclass(kind, Stopped) and stopping:
            return {"kind": "stopped", "error": fields}
        meta: Meta = {"kind": "error", "error": fields}
        if _is_permanent(leaf):
            meta["permanent"] = True
        if with_sqlstate and (sqlstate := find_sqlstate(leaf)) is not None:
            meta["sqlstate"] = sqlstate
        return meta
    except BaseException:  # noqa: BLE001 - out of memory or of stack: what is left is to say that it failed
        return {"kind": "error", "error": {"type": "unknown", "message": "the error cannot be shown", "traceback": ""}}


def failure(type_name: str, message: str, *, kind: str = "error", sqlstate: str | None = None) -> Meta:
    """An error of our own finding, by the name of its type."""
    meta: Meta = {"kind": kind, "error": {"type": type_name, "message": clean_text(message), "traceback": ""}}
    if sqlstate is not None:
        meta["sqlstate"] = sqlstate
    return meta


def describe(error: BaseException, start: TracebackType | None) -> ErrorFields:
    """Type, message and traceback as clean, bounded text. `start`: the first frame worth showing."""
    return {
        "type": clean_text(_type_name(error), 512),
        "message": clean_text(error),
        "traceback": _traceback(error, start),
    }


def without_our_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame that is not ours."""
    try:
        # The slot of BaseException, not the attribute: a subclass may have a property of this name.
        current: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
        start = current
        while current is not None and current.tb_frame.f_code.co_filename.startswith(_NOT_SHOWN):
            current = current.tb_next
        return current if current is not None else start
    except BaseException:  # noqa: BLE001 - out of memory, or interrupted
        return None


def find_sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code, also where an ORM has wrapped the driver's error. By attribute: psycopg is not imported."""
    seen: object = error
    for _ in range(_MAX_CHAIN):
        try:
            code = getattr(seen, "sqlstate", None)
            if type(code) is str and len(code) == _SQLSTATE_LENGTH and code.isalnum():
                return code
            wrapped = getattr(seen, "orig", None)
            seen = wrapped if wrapped is not None else getattr(seen, "__cause__", None)
        except BaseException:  # noqa: BLE001 - attribute access may raise or exit
            return None
        if seen is None:
            return None
    return None


def _only_leaf(error: BaseException) -> BaseException:
    """The one exception in a group of one: a task group wraps what its only task raised."""
    for _ in range(_MAX_CHAIN):
        if not issubclass(type(error), BaseExceptionGroup):
            break
        inner = BaseExceptionGroup.exceptions.__get__(error)
        if len(inner) != 1:
            break
        error = inner[0]
    return error


def _is_permanent(error: BaseException) -> bool:
    try:
        return bool(getattr(error, "permanent", False))
    except BaseException:  # noqa: BLE001 - a property may raise or exit
        return False


def _type_name(error: BaseException) -> str:
    try:
        kind = type(error)
        module = kind.__module__
        return kind.__qualname__ if module in {"builtins", "__main__"} else f"{module}.{kind.__qualname__}"
    except BaseException:  # noqa: BLE001 - a metaclass may have properties of these names
        return "unknown"


def _traceback(error: BaseException, start: TracebackType | None) -> str:
    try:
        summary = tracebacks.TracebackException(type(error), error, start, compact=True)
        return _tail("".join(summary.format()))
    except BaseException:  # noqa: BLE001 - hostile attributes, deep groups, no memory: try the frames alone
        try:
            return _tail("".join(tracebacks.format_tb(start)))
        except BaseException:  # noqa: BLE001 - see above
            return ""


def _tail(text: str) -> str:
    """Keep the end of a traceback that is too long: that is where the error is."""
    if len(text) <= TEXT_LIMIT_BYTES // 4:
        return clean_text(text)
    head, tail = text[: TEXT_LIMIT_BYTES // 8], text[-TEXT_LIMIT_BYTES // 2 :]
    return clean_text(text if len(text) <= len(head) + len(tail) else f"{head}\n  ... [cut]\n{tail}")

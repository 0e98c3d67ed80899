"""From "package.module:function" to a callable, or a typed reason why there is none.

The same loader serves a child and `check`, so that what `check` accepts starts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from child.outcomes import ErrorFields, describe, without_our_frames

POSITIONALS: Final = {"regular": 1, "transactional": 2}
_FIRST_LINE: Final = {"regular": "def handle(message)", "transactional": "def handle(message, tx)"}


class LoadError(Exception):
    """The handler cannot be used.

    `kind`: "missing" and "signature" are final, "import" may heal, "version" is a change of our own package.
    """

    def __init__(self, kind: str, error: str, traceback: str = "") -> None:
        super().__init__(error)
        self.kind = kind
        self.error = error
        self.traceback = traceback


def load_handler(reference: str, mode: str) -> Callable[..., Any]:
    """Import and return the handler. Raises `LoadError` for everything, whatever the module does."""
    module_name, separator, attribute_path = reference.partition(":")
    if not separator or not module_name or not attribute_path or module_name.startswith("."):
        raise LoadError("missing", f"handler {reference!r} is not of the form package.module:function")
    target = _import(module_name, reference)
    for attribute in attribute_path.split("."):
        target = _attribute(target, attribute, reference)
    _check_callable(target, reference, mode)
    handler: Callable[..., Any] = target
    return handler


def _import(module_name: str, reference: str) -> Any:
    origin = os.getpid()
    try:
        return importlib.import_module(module_name)
    except BaseException as error:  # noqa: BLE001 - a module may raise or exit as it likes while it is imported
        fields = describe(error, without_our_frames(error))
        if type(error) is ModuleNotFoundError and _is_part(error.name, module_name):
            raise LoadError("missing", f"handler {reference!r}: no module {error.name!r} in {_searched()}") from None
        shown = f"{fields['type']}: {fields['message']}" if fields["message"] else fields["type"]
        raise LoadError("import", f"importing {module_name} failed: {shown}", fields["traceback"]) from None
    finally:
        if os.getpid() != origin:
            os._exit(0)  # a copy that the module forked and that came back: it is not the one that was started


def _is_part(missing: object, module_name: str) -> bool:
    """Whether the module that was not found is the handler's own, not one that it needs."""
    return isinstance(missing, str) and (module_name == missing or module_name.startswith(missing + "."))


def _searched() -> str:
    return sys.path[0] if sys.path else "an empty sys.path"


def _attribute(target: Any, name: str, reference: str) -> Any:
    try:
        return getattr(target, name)
    except AttributeError:
        where = getattr(target, "__name__", type(target).__name__)
        raise LoadError("missing", f"handler {reference!r}: {where} has no {name!r}") from None
    except BaseException as error:  # noqa: BLE001 - a module's __getattr__ may raise anything
        fields: ErrorFields = describe(error, without_our_frames(error))
        raise LoadError("import", f"looking up {reference} failed: {fields['type']}", fields["traceback"]) from None


def _check_callable(target: Any, reference: str, mode: str) -> None:
    try:
        if not callable(target):
            raise LoadError("signature", f"handler {reference!r} is not callable: it is {type(target).__name__}")
        plain = inspect.isroutine(target) or inspect.isclass(target) or isinstance(target, functools.partial)
        body = target if plain else getattr(target, "__call__", target)  # noqa: B004 - the method, not whether there is one
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise LoadError("signature", f"handler {reference!r} has a yield: calling it would run nothing")
        signature = inspect.signature(target)
    except LoadError:
        raise
    except BaseException:  # noqa: BLE001 - written in C or hostile: what cannot be inspected is accepted
        return
    try:
        signature.bind(*range(POSITIONALS[mode]))
    except TypeError:
        raise LoadError(
            "signature",
            f"handler {reference!r} takes {signature}, but a {mode} handler is called with "
            f"{POSITIONALS[mode]} positional argument(s): {_FIRST_LINE[mode]}",
        ) from None

"""Methods that are made from operations look like ones that were written: name, signature, documentation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["describe"]

Method = TypeVar("Method", bound=Callable[..., Any])


def describe(method: Method, build: Callable[..., Any]) -> Method:
    """Give `method` the name, arguments and documentation of the operation that it carries out."""
    signature = inspect.signature(build)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__name__ = build.__name__
    method.__doc__ = build.__doc__
    result = str(signature.return_annotation).removeprefix("Request[").removesuffix("]")
    described = signature.replace(parameters=[itself, *signature.parameters.values()], return_annotation=result)
    setattr(method, "__signature__", described)  # noqa: B010 - a function's type does not know this attribute
    return method

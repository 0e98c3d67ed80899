"""The types of the configuration's values: what is accepted, and what a refusal says.

A value from the file has its TOML type and must be of the right one; a value from the environment or a flag is text
(marked as `Text`) and is read as the type that the key has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from shared.durations import parse_duration, parse_optional_duration
from shared.errors import ValidationError
from shared.naming import validate_queue_name
from shared.sizes import parse_optional_size

__all__ = [
    "Duration",
    "Flag",
    "Grace",
    "HandlerPath",
    "MemoryLimit",
    "Name",
    "NonEmpty",
    "OptionalDuration",
    "Text",
    "integer",
    "number",
    "one_of",
    "refusal",
]

MIN_MEMORY: Final = 20 << 20  # a bare interpreter has about 10 MB; the exact check is made when a child is READY
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class Text(str):
    """A value that came as text, from the environment or a flag: it may stand for a number or a truth value."""

    __slots__ = ()


def refusal(reason: str, remedy: str) -> PydanticCustomError:
    """Build the error that pydantic collects; the loader turns it into a `Problem`."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "remedy": remedy})


def _type_name(value: object) -> str:
    """Name a type as a TOML reader knows it."""
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return names.get(type(value), "a string" if isinstance(value, str) else f"a {type(value).__name__}")


def _delegated(parse: Callable[[Any], float | int | None], value: object) -> float | int | None:
    """Parse by a function of `shared`, whose errors carry their own remedy."""
    try:
        return parse(value)
    except ValidationError as error:
        raise refusal(error.message, error.remedy or "see docs/configuration.md") from error


def _duration(value: object) -> float:
    seconds = _delegated(parse_duration, value)
    assert seconds is not None
    return float(seconds)


def _positive_duration(value: object) -> float:
    seconds = _duration(value)
    if seconds == 0:
        raise refusal("is zero", 'write a positive duration such as "250ms", "30s", "5m", "2h"')
    return seconds


def _optional_duration(value: object) -> float | None:
    seconds = _delegated(parse_optional_duration, value)
    if seconds == 0:
        raise refusal("is zero", 'write "none" for no limit, or a positive duration such as "30s"')
    return seconds


def _memory(value: object) -> int | None:
    size = _delegated(parse_optional_size, value)
    if size is not None and size < MIN_MEMORY:
        raise refusal(
            "is less than a Python interpreter needs",
            'write "none", or a size that leaves room for the imports of the handler, such as "512MB"',
        )
    return None if size is None else int(size)


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Text) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    reason = "is no boolean" if isinstance(value, Text) else f"is {_type_name(value)}, no boolean"
    raise refusal(reason, "write true or false")


def _non_empty(value: object) -> str:
    if not isinstance(value, str):
        raise refusal(f"is {_type_name(value)}, no string", "put the value in quotes")
    if not value.strip():
        raise refusal("is empty", "give it a value, or leave the key out")
    if "\x00" in value:
        raise refusal("has a NUL character", "take it out")
    return str.__str__(value)


def _handler(value: object) -> str:
    text = _non_empty(value).strip()
    module, colon, attribute = text.partition(":")
    if not colon:
        reason = "has no colon between module and function"
        stem = text.removesuffix(".py").replace("/", ".").strip(".")
        parts = stem.rpartition(".")
        guess = f"{parts[0]}:{parts[2]}" if parts[0] else f"{stem}:handle"
        raise refusal(reason, f'write "package.module:function", perhaps "{guess}"')
    if module.endswith(".py") or "/" in module:
        guess = module.removesuffix(".py").strip("./").replace("/", ".")
        raise refusal("names a file, not a module", f'write the module as it is imported: "{guess}:{attribute}"')
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise refusal("is not a path of a function", 'write "package.module:function", Python names joined by dots')
    return text


def _name(value: object) -> str:
    text = _non_empty(value)
    try:
        validate_queue_name(text)
    except ValidationError as error:
        raise refusal(error.message, error.remedy or "use a-z, 0-9 and _") from error
    return text


def integer(minimum: int, maximum: int, *, none_as: str | None = None) -> BeforeValidator:
    """An integer within bounds. `none_as`: the word that stands for None ("none", "auto")."""
    word = f'"{none_as}" or ' if none_as else ""
    remedy = f"write {word}an integer from {minimum} to {maximum}"

    def check(value: object) -> int | None:
        if none_as is not None and (value is None or (isinstance(value, str) and value.strip().lower() == none_as)):
            return None
        if isinstance(value, Text) and _INTEGER.fullmatch(value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal("is no integer" if isinstance(value, Text) else f"is {_type_name(value)}, no integer", remedy)
        if value < minimum:
            raise refusal("is negative" if value < 0 else f"is below {minimum}", remedy)
        if value > maximum:
            raise refusal(f"is above {maximum}", remedy)
        return value

    return BeforeValidator(check)


def one_of(*choices: str) -> BeforeValidator:
    """One of a few words."""
    listed = ", ".join(f'"{choice}"' for choice in choices)

    def check(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return str.__str__(value)
        if isinstance(value, str) and value.strip().lower() in choices:
            return value.strip().lower()
        raise refusal("is none of the possible values", f"write one of {listed}")

    return BeforeValidator(check)


def number(minimum: float, maximum: float) -> BeforeValidator:
    """A finite number within bounds, whole or not."""
    remedy = f"write a number from {minimum:g} to {maximum:g}"

    def check(value: object) -> float:
        if isinstance(value, Text):
            try:
                value = float(value)
            except ValueError:
                raise refusal("is no number", remedy) from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(f"is {_type_name(value)}, no number", remedy)
        if not minimum <= value <= maximum:
            raise refusal(f"is not between {minimum:g} and {maximum:g}", remedy)
        return float(value)

    return BeforeValidator(check)


Duration = Annotated[float, BeforeValidator(_positive_duration)]  # seconds, more than none
Grace = Annotated[float, BeforeValidator(_duration)]  # seconds, none allowed
OptionalDuration = Annotated[float | None, BeforeValidator(_optional_duration)]  # seconds, None for "none"
MemoryLimit = Annotated[int | None, BeforeValidator(_memory)]  # bytes, None for "none"
Flag = Annotated[bool, BeforeValidator(_flag)]
NonEmpty = Annotated[str, BeforeValidator(_non_empty)]
HandlerPath = Annotated[str, BeforeValidator(_handler)]
Name = Annotated[str, BeforeValidator(_name)]

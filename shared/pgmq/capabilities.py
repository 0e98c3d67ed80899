"""What the server and its PGMQ can do, read from the catalogs: versions, exact signatures, fields of results.

PGMQ that was installed by its SQL records no version anywhere; its signatures say what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.pgmq.answers import Rows
from shared.pgmq.operations import Request
from shared.pgmq.sqlstate import Moment
from shared.pgmq.statements import client

__all__ = ["Argument", "Capabilities", "Field", "Function", "capabilities"]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function; `type` in PostgreSQL's own words."""

    name: str
    type: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a result."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Function:
    """One overload of a function of schema pgmq. `fields` is empty for a result that is no record."""

    name: str
    arguments: tuple[Argument, ...]
    result: str
    fields: tuple[Field, ...]

    @property
    def signature(self) -> str:
        """Name, names and types of arguments, result."""
        arguments = ", ".join(f"{one.name} {one.type}".strip() + "?" * one.optional for one in self.arguments)
        return f"{self.name}({arguments}) -> {self.result}"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The server and its PGMQ.

    `server_version_num` is PostgreSQL's (150018 for 15.18); `pgmq_version` that of the extension, None where PGMQ was
    installed by its SQL or not at all; `functions` has every overload of schema pgmq, empty where there is no PGMQ.
    """

    server_version_num: int
    server_version: str
    pgmq_version: str | None
    partman_version: str | None
    functions: tuple[Function, ...]
    _by_name: Mapping[str, tuple[Function, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the functions."""
        by_name: dict[str, tuple[Function, ...]] = {}
        for function in self.functions:
            by_name[function.name] = (*by_name.get(function.name, ()), function)
        object.__setattr__(self, "_by_name", by_name)

    @property
    def has_pgmq(self) -> bool:
        """Whether messages can be sent and read."""
        return "send" in self._by_name and "read" in self._by_name

    def overloads(self, name: str) -> tuple[Function, ...]:
        """Give every overload of a function, none where it does not exist."""
        return self._by_name.get(name, ())

    def takes(self, name: str, *types: str) -> bool:
        """Tell whether a function can be called with arguments of exactly these types, in this order."""
        for function in self.overloads(name):
            given = [one.type for one in function.arguments[: len(types)]]
            if given == list(types) and all(one.optional for one in function.arguments[len(types) :]):
                return True
        return False

    def gives(self, name: str, field_name: str) -> bool:
        """Tell whether a function's result has a field."""
        return any(one.name == field_name for function in self.overloads(name) for one in function.fields)


def capabilities() -> Request[Capabilities]:
    """Ask the catalogs. Works without PGMQ too."""
    return Request("capabilities", client.CAPABILITIES, None, _decode, Moment.READ)


def _decode(rows: Rows) -> Capabilities:
    document: Mapping[str, Any] = json.loads(rows[0][0])
    extensions = document["extensions"]
    return Capabilities(
        server_version_num=document["server_version_num"],
        server_version=document["server_version"],
        pgmq_version=extensions.get("pgmq"),
        partman_version=extensions.get("pg_partman"),
        functions=tuple(
            Function(
                name=one["name"],
                arguments=tuple(Argument(**argument) for argument in one["arguments"]),
                result=one["result"],
                fields=tuple(Field(**part) for part in one["fields"]),
            )
            for one in document["functions"]
        ),
    )

"""Both faces have the same methods, and they look as if they had been written by hand."""

from __future__ import annotations

import inspect

import pytest

from shared.pgmq import operations
from shared.pgmq.aio import AsyncClient, AsyncTransaction
from shared.pgmq.blocking import Client, Transaction

NAMES = [
    name
    for name, build in vars(operations).items()
    if inspect.isfunction(build) and build.__module__ == operations.__name__ and not name.startswith("_")
]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"purge_step"}))
@pytest.mark.parametrize("face", [Client, Transaction, AsyncClient, AsyncTransaction])
def test_every_operation_is_a_method_of_every_face(face: type, name: str) -> None:
    """With the operation's name, arguments and documentation."""
    method, build = getattr(face, name), getattr(operations, name)
    assert (method.__name__, method.__doc__) == (name, build.__doc__)
    assert list(inspect.signature(method).parameters)[1:] == list(inspect.signature(build).parameters)
    assert inspect.iscoroutinefunction(method) is face.__name__.startswith("Async")


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (Transaction, AsyncTransaction)])
def test_the_faces_do_not_differ(one: type, other: type) -> None:
    """What is on one is on the other, with the same arguments."""

    def public(face: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters) if callable(value) else []
            for name, value in inspect.getmembers(face)
            if not name.startswith("_")
        }

    assert public(one) == public(other)


def test_signatures_say_what_comes_back() -> None:
    """Not the request, but its answer."""
    assert inspect.signature(Client.send).return_annotation == "int"
    assert inspect.signature(Client("").read).return_annotation == "list[Message]"

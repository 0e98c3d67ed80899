"""Things that cannot be handlers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

number = 7


def no_arguments() -> None:
    """Take nothing."""


def one(message: Any) -> None:
    """Take a message."""


def two(message: Any, tx: Any) -> None:
    """Take a message and a transaction."""


def generator(message: Any) -> Iterator[None]:
    """Run only when iterated."""
    yield


def keyword_only(message: Any, *, tx: Any) -> None:
    """Want a keyword."""


def optional(message: Any, tx: Any = None) -> None:
    """Take both."""


partial = functools.partial(two, tx=None)


class Space:
    """Dotted attributes."""

    @staticmethod
    def inner(message: Any) -> None:
        """Take a message."""


from_c = print

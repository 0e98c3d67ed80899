"""What a statement of the caller's own gave back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared.errors import ProtocolError

__all__ = ["Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """Rows as tuples; `row_count` is what the statement gave or changed, -1 where the server does not say."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    row_count: int

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Go through the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Count the rows that came."""
        return len(self.rows)

    def one(self) -> tuple[Any, ...]:
        """Give the only row. Raises `ProtocolError` unless there is exactly one."""
        if len(self.rows) != 1:
            raise ProtocolError(f"expected one row, got {len(self.rows)}", operation="execute")
        return self.rows[0]

    def value(self) -> Any:
        """Give the first value of the only row. Raises `ProtocolError` unless there is exactly one row."""
        return self.one()[0]

"""The examples of docs/sdk.md run, one after the other, as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_example_works(database: str) -> None:
    """Each block continues where the one before it ended; at the end no queue is left."""
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "example", "dsn": database}
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) >= 9
    for block in blocks:
        # Lines are numbered as in the page, so that a traceback leads there.
        source = "\n" * text[: block.start(1)].count("\n") + block[1]
        exec(compile(source, str(PAGE), "exec"), names)  # noqa: S102 - running the examples is the test
    with psycopg.connect(database) as connection:
        assert connection.execute("select count(*) from pgmq.meta").fetchone() == (0,)

"""One durable server for all scenes of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crashtests.ground import Ground, ground


@pytest.fixture(scope="session")
def crash_ground() -> Iterator[Ground]:
    """Start it with PostgreSQL's own durability settings: the scenes kill what writes."""
    with ground() as place:
        yield place

"""A plugin for pytest: of all tests, those that a server's version can matter to."""

from __future__ import annotations

import pytest

_OF_A_SERVER = frozenset({"server_dsn", "own_server"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what uses a server of the tests."""
    kept = [item for item in items if _OF_A_SERVER & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept

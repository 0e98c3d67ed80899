"""A short round through both modes, on whatever server the tests are given: what `make matrix` runs on old versions."""

from __future__ import annotations

from pathlib import Path

from tests.support.both_modes import work


def test_both_modes_account_for_every_message(tmp_path: Path, database: str) -> None:
    """Done, failed, died, asked for a retry, rejected: archive, dead letters, business rows and sent messages agree."""
    work(tmp_path, database, database)

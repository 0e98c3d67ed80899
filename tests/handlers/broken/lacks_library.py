"""Needs what is not there."""

import a_library_that_is_not_there  # type: ignore[import-not-found] # noqa: F401 - see above


def handle(message: object) -> None:
    """Never reached."""

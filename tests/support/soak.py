"""Tests that have a long variant: SUPERVISOR_TEST_SOAK=1 chooses it, and `make soak` runs them all (`-m soak`)."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["SOAK"]

SOAK: Final = bool(os.environ.get("SUPERVISOR_TEST_SOAK"))

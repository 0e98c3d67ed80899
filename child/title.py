"""What `ps` shows of a child. Setting a title costs half a microsecond, so it is never stale."""

from __future__ import annotations

from collections.abc import Callable

try:
    from setproctitle import setproctitle
except ImportError:  # pragma: no cover - a platform without a wheel: titles are a comfort
    _set: Callable[[str], None] | None = None
else:
    _set = setproctitle


def _nothing(_title: str) -> None:
    """Show nothing."""


class Title:
    """The title of one child: `pgmq-child queue[slot] ...`."""

    __slots__ = ("_base", "_idle", "_show")

    def __init__(self, queue: str, slot: int, *, on: bool) -> None:
        self._base = f"pgmq-child {queue}[{slot}] "
        self._idle = self._base + "idle"
        self._show = _set if on and _set is not None else _nothing

    def show_starting(self) -> None:
        """Imports run."""
        self._show(self._base + "starting")

    def show_message(self, msg_id: int, attempt: int) -> None:
        """A handler runs."""
        self._show(f"{self._base}#{msg_id} attempt {attempt}")

    def show_claiming(self) -> None:
        """A transaction is open, or about to be."""
        self._show(self._base + "claiming")

    def show_idle(self) -> None:
        """Nothing in hand."""
        self._show(self._idle)

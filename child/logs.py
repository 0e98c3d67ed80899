"""`message.log`: an ordinary logger whose records travel as LOG frames, bounded in size and in rate."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from child.limits import Allowance
from shared.text import clean_text
from shared.wire.frames import Kind

if TYPE_CHECKING:
    from child.channel import Channel

_TEXT_BYTES: Final = 8192
_BURST: Final = 200
_PER_S: Final = 100.0


def logger_for(channel: Channel, seq: int, queue: str) -> logging.Logger:
    """A logger of this message only, not in the registry of loggers: none of them outlives its message."""
    logger = logging.Logger(f"pgmq_supervisor.{queue}", logging.DEBUG)  # noqa: LOG001 - not in the registry on purpose
    logger.addHandler(_FrameHandler(channel, seq))
    return logger


class _FrameHandler(logging.Handler):
    """Sends records to the parent. What is over the bound is counted and told with the next that is sent."""

    def __init__(self, channel: Channel, seq: int) -> None:
        super().__init__()
        self._channel = channel
        self._seq = seq
        self._allowance = Allowance(burst=_BURST, per_s=_PER_S, now=time.monotonic())
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._allowance.take(time.monotonic()):
                self._dropped += 1
                return
            text = clean_text(self.format(record), _TEXT_BYTES)
        except Exception:  # noqa: BLE001 - a record's arguments are the handler's; logging must not fail it
            self.handleError(record)
            return
        meta: dict[str, object] = {"level": record.levelname.lower(), "text": text}
        if self._dropped:
            meta["dropped"], self._dropped = self._dropped, 0
        self._channel.say(Kind.LOG, self._seq, meta)

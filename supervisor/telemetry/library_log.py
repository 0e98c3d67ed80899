"""What libraries say through the standard library's logging, in our form and with our limits."""

from __future__ import annotations

import logging
import traceback

from supervisor.telemetry.catalogue import Level
from supervisor.telemetry.log import LogSink


class LibraryHandler(logging.Handler):
    """Passes records on to the log sink. aiohttp, asyncio and psycopg write warnings and errors this way."""

    def __init__(self, log: LogSink) -> None:
        super().__init__(level=logging.WARNING)
        self._log = log

    def install(self) -> None:
        """Become the only handler of the root logger."""
        root = logging.getLogger()
        for handler in list(root.handlers):
            root.removeHandler(handler)
        root.addHandler(self)
        logging.raiseExceptions = False  # a log that fails writes no traceback to stderr
        logging.captureWarnings(capture=True)

    def uninstall(self) -> None:
        """Undo `install`, but for handlers that were there before."""
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(capture=False)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on; never raises."""
        try:
            level = Level.ERROR if record.levelno >= logging.ERROR else Level.WARNING
            text = None
            if record.exc_info and record.exc_info[0] is not None:
                text = "".join(traceback.format_exception(*record.exc_info))
            self._log.library(record.name, level, record.getMessage(), text)
        except Exception:  # noqa: BLE001 - the boundary of the log
            self.handleError(record)

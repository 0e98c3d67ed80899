"""A network that misbehaves: a TCP proxy between a supervisor and PostgreSQL.

client ──▶ request thread ──▶ PostgreSQL        cut: both ends are closed, in mid-word
       ◀── answer thread ◀──                    freeze: nothing passes, nobody is told
                                                late: every piece takes so long
a tripwire watches the statements that are said, swallow: the request is carried out, its answer is lost
prepared ones when they are bound:              withhold: the request never arrives
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from psycopg import conninfo

from crashtests.wiretap import Statements

__all__ = ["Proxy", "Tripwire", "What"]

_PIECE_BYTES: Final = 1 << 16
_FIRST_BYTES: Final = 1024  # the question for TLS, and who it is
_READY: Final = b"Z\x00\x00\x00\x05"
_RESET: Final = struct.pack("ii", 1, 0)  # linger 0: the peer gets a reset, not an orderly end
_CONNECT_LIMIT_S: Final = 10.0


class What(StrEnum):
    """What happens to the request that touches a tripwire; its connection ends in both cases."""

    SWALLOW = "swallow"
    WITHHOLD = "withhold"


class Tripwire:
    """Waits for a statement with `pattern` in it, on connections whose first words contain `who`; springs once."""

    def __init__(self, pattern: re.Pattern[str], what: What, who: bytes) -> None:
        """Armed from the start."""
        self.pattern = pattern
        self.what = what
        self.who = who
        self._touched = threading.Event()
        self._sprung = threading.Event()
        self._lock = threading.Lock()

    def touch(self) -> bool:
        """Claim it for one connection; False where another one was faster."""
        with self._lock:
            if self._touched.is_set():
                return False
            self._touched.set()
            return True

    def spring(self) -> None:
        """It has happened."""
        self._sprung.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has happened; False where nobody came."""
        return self._sprung.wait(timeout_s)


class Proxy:
    """Listens on loopback. All methods may be called from any thread."""

    def __init__(self, dsn: str) -> None:
        """Stand before the server of this DSN, on a Unix socket or on TCP."""
        self._connect = _connector(dsn)
        self._dsn = dsn
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._tripwires: list[Tripwire] = []
        self._closing = False
        self.late_s = 0.0
        self.refusing = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def dsn(self) -> str:
        """The DSN through this proxy."""
        return conninfo.make_conninfo(self._dsn, host="127.0.0.1", port=str(self.port))

    def cut(self) -> int:
        """End every connection; gives how many there were."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def freeze(self) -> None:
        """Let nothing pass, on these connections and on new ones."""
        self._flows.clear()

    def thaw(self) -> None:
        """Let it pass again, with all that has waited."""
        self._flows.set()

    def tripwire(self, pattern: str, what: What, *, who: bytes = b"") -> Tripwire:
        """Set one; `pattern` is a regular expression, in any case."""
        made = Tripwire(re.compile(pattern, re.IGNORECASE), what, who)
        with self._lock:
            self._tripwires.append(made)
        return made

    def close(self) -> None:
        """End everything."""
        self._closing = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self.refusing or self._closing:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name="proxy link", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = self._connect()
        except OSError:
            client.close()
            return
        link = _Link(self, client, server)
        with self._lock:
            self._links.add(link)
        link.run()
        with self._lock:
            self._links.discard(link)

    def pass_on(self, data: bytes, to: socket.socket) -> None:
        """Send, when and how the network lets it."""
        self._flows.wait()
        if self.late_s:
            time.sleep(self.late_s)
        to.sendall(data)

    def touched(self, statement: str, first_words: bytes) -> Tripwire | None:
        """The tripwire that this statement touches."""
        with self._lock:
            for tripwire in self._tripwires:
                if tripwire.pattern.search(statement) and tripwire.who in first_words and tripwire.touch():
                    self._tripwires.remove(tripwire)
                    return tripwire
        return None


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._first_words = b""
        self._statements = Statements()
        self._swallows: Tripwire | None = None

    def run(self) -> None:
        answers = threading.Thread(target=self._carry, args=(self._server, self._answer), daemon=True)
        answers.start()
        self._carry(self._client, self._request)
        answers.join()
        self._client.close()
        self._server.close()

    def _carry(self, source: socket.socket, take: Callable[[bytes], bool]) -> None:
        try:
            while (data := source.recv(_PIECE_BYTES)) and take(data):
                pass
        except OSError:
            pass
        self.cut()

    def _request(self, data: bytes) -> bool:
        if len(self._first_words) < _FIRST_BYTES:
            self._first_words += data
        for statement in self._statements.feed(data):
            tripwire = self._proxy.touched(statement, self._first_words)
            if tripwire is None:
                continue
            if tripwire.what is What.WITHHOLD:
                self.cut()
                tripwire.spring()
                return False
            self._swallows = tripwire
        self._proxy.pass_on(data, self._server)
        return True

    def _answer(self, data: bytes) -> bool:
        if (tripwire := self._swallows) is not None:
            if _READY not in data:
                return True  # not the end of the answer yet
            self.cut()
            tripwire.spring()
            return False
        self._proxy.pass_on(data, self._client)
        return True

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _connector(dsn: str) -> Callable[[], socket.socket]:
    given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    host, port = str(given.get("host") or "localhost"), str(given.get("port") or "5432")
    if not host.startswith("/"):
        return lambda: socket.create_connection((host, int(port)), _CONNECT_LIMIT_S)

    def connect() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(f"{host}/.s.PGSQL.{port}")
        except OSError:
            made.close()
            raise
        return made

    return connect

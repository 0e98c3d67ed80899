"""A supervisor for one test: started on one handler, killed, stopped, and asked what it has done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crashtests.ground import connect
from crashtests.processes import wait_until
from crashtests.rendezvous import Rendezvous
from crashtests.stage import Queue, Stage

__all__ = ["Supervisor"]


def toml(value: object) -> str:
    """A value of a configuration as TOML writes it. Raises `TypeError`."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value)
        case int() | float():
            return repr(value)
        case Mapping():
            return "{ " + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + " }"
        case _:
            raise TypeError(f"{value!r} is no value of a configuration")


class Supervisor:
    """`python -m supervisor run` with one queue. Options are those of the configuration, as Python values."""

    def __init__(
        self,
        folder: Path,
        dsn: str,
        handler: str,
        *,
        mode: str = "regular",
        queue: str = "jobs",
        app_dir: Path | None = None,
        points: Rendezvous | None = None,
        environ: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        """Make the queue and start. `app_dir`: where the handler is imported from (None: the working directory)."""
        self.queue = queue
        self.dsn = dsn
        self._session = connect(dsn)
        self._session.execute("select pgmq.create(%s)", [queue])
        chosen = {"on_success": "archive", "polling_interval": "1s", **options}
        section = Queue(queue, handler, mode, {name: toml(value) for name, value in chosen.items()})
        given = {**({} if points is None else points.environ()), **(environ or {})}
        self._stage = Stage(folder, dsn, [section], app_dir=app_dir or Path.cwd(), environ=given)
        self.start()

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, body: object, *, delay_s: int = 0) -> int:
        """Send one message; gives its id."""
        row = self._session.execute(
            "select pgmq.send(%s, %s::jsonb, %s)", [self.queue, json.dumps(body), delay_s]
        ).fetchone()
        assert row is not None
        return int(row[0])

    def wait_until_empty(self, timeout_s: float = 30.0) -> None:
        """Wait until nothing is in the queue, not even invisibly; fails after `timeout_s`, with the log."""

        def over() -> bool:
            return not self._count(f"q_{self.queue}") or not self._stage.running

        found = wait_until(over, timeout_s, every_s=0.02) and self._stage.running
        assert found, f"{self._count(f'q_{self.queue}')} messages are left:\n{self.log}"

    def acknowledged(self) -> list[Any]:
        """Bodies of what was acknowledged; needs on_success = "archive", which is the default here."""
        return [body for (body,) in self._session.execute(f"select message from pgmq.a_{self.queue} order by msg_id")]

    def dead_letters(self) -> list[Any]:
        """The dead letters."""
        return [letter for (letter,) in self._session.execute(f"select message from pgmq.q_{self.queue}_dlq")]

    def _count(self, table: str) -> int:
        row = self._session.execute(f"select count(*) from pgmq.{table}").fetchone()
        return int(row[0]) if row else 0

    # --- its life ---------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._stage.parent.pid

    @property
    def children(self) -> list[int]:
        """The processes that run the handler."""
        return self._stage.children()

    @property
    def log(self) -> str:
        """The end of what it and its children wrote."""
        return self._stage.log_tail()

    def start(self) -> None:
        """Start it, where it does not run."""
        self._stage.start()

    def kill(self) -> None:
        """SIGKILL the parent, and wait until nothing of it lives."""
        self._stage.parent.kill()
        left = self._stage.wait_for_silence(10.0)
        assert not left, f"processes {left} outlive their supervisor"

    def stop(self) -> int | None:
        """TERM, and wait; gives the exit code."""
        return self._stage.stop()

    def close(self) -> None:
        """Whatever happened: nothing stays."""
        self._stage.close()
        self._session.close()

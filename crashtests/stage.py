"""A supervisor as its users run it: a process of its own with a configuration file, started, killed, started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from crashtests.processes import Process, children_of, marked, title_of, wait_until

__all__ = ["APP", "Queue", "Stage"]

APP: Final = Path(__file__).parent / "app"
MARK: Final = "CRASHTESTS_STAGE"  # in the environment of everything that this stage starts
_STOP_LIMIT_S: Final = 60.0
_TAIL_BYTES: Final = 6000
_GRACE: Final = 'grace = "10s"\nkill_after = "5s"\n'


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue of the configuration. `options` are TOML values as they are written there."""

    name: str
    handler: str
    mode: str = "regular"
    options: Mapping[str, str] = field(default_factory=dict)

    def toml(self) -> str:
        """Its section."""
        lines = [f"[queues.{self.name}]", f'handler = "{self.handler}"', f'mode = "{self.mode}"']
        return "\n".join(lines + [f"{key} = {value}" for key, value in self.options.items()]) + "\n"


class Stage:
    """One configuration and, one after another, the supervisors that run it."""

    def __init__(
        self,
        folder: Path,
        dsn: str,
        queues: list[Queue],
        *,
        app_dir: Path = APP,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Write the configuration; nothing is started."""
        self.folder = folder
        self.dsn = dsn
        self.log_path = folder / "supervisor.log"
        self.name = folder.name
        self._app_dir = app_dir
        self._config = folder / "supervisor.toml"
        sections = [
            f"[shutdown]\n{_GRACE}",
            f'[control]\nsocket = "{folder / "control"}"\n',
            '[log]\nformat = "json"\n',
        ]
        self._config.write_text("\n".join(sections + [queue.toml() for queue in queues]))
        self._environ = {key: value for key, value in os.environ.items() if not key.upper().startswith("SUPERVISOR_")}
        self._environ |= {"SUPERVISOR_DSN": dsn, "DATABASE_URL": dsn, MARK: self.name, **(environ or {})}
        self._popen: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None
        self.starts = 0

    def add_environ(self, more: Mapping[str, str]) -> None:
        """Give the next supervisors more variables."""
        self._environ |= more

    # --- its life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a supervisor, where none runs."""
        if self.running:
            return
        self._forget()
        command = [sys.executable, "-m", "supervisor", "run", "--config", str(self._config)]
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [*command, "--app-dir", str(self._app_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                cwd=self.folder,
            )
        self._process = Process(self._popen.pid)
        self.starts += 1

    @property
    def running(self) -> bool:
        """Whether a supervisor lives."""
        return self._process is not None and not self._process.gone

    @property
    def parent(self) -> Process:
        """The supervisor's process."""
        if self._process is None:
            raise ProcessLookupError("no supervisor was started")
        return self._process

    def children(self) -> list[int]:
        """Its children that run handlers."""
        return children_of(self.parent.pid)

    def guards(self) -> list[int]:
        """Its guard: the one child of it that has no mark of a child."""
        return [pid for pid in children_of(self.parent.pid, with_mark=False) if "guard" in title_of(pid)]

    def stop(self, timeout_s: float = _STOP_LIMIT_S) -> int | None:
        """TERM, as a deploy does; gives the exit code, None where it did not stop in time and was killed."""
        if self._popen is None:
            return 0
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._forget()

    def exit_code(self) -> int | None:
        """The code of a supervisor that has ended; None while it lives."""
        return None if self._popen is None else self._popen.poll()

    def close(self) -> None:
        """Kill what is left of it, whatever it is."""
        self._forget()
        for pid in self.left_over():
            with contextlib.suppress(ProcessLookupError), contextlib.closing(Process(pid)) as process:
                process.kill()

    def _forget(self) -> None:
        if self._popen is not None:
            if self._popen.poll() is None:
                self._popen.kill()
            self._popen.wait()
        if self._process is not None:
            self._process.close()
        self._popen = self._process = None

    # --- what is left of it -----------------------------------------------------------------------------------------

    def left_over(self) -> list[int]:
        """Living processes that this stage started, at whatever remove."""
        return marked(MARK, self.name)

    def wait_for_silence(self, timeout_s: float) -> list[int]:
        """After its end: what still lives when the time is over."""
        wait_until(lambda: not self.left_over(), timeout_s, every_s=0.02)
        return self.left_over()

    def log_tail(self) -> str:
        """The end of what it and its children wrote."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

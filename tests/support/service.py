"""The supervisor as its users run it: a process of its own, with a configuration file and an application folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tests.support.waiting import eventually

STOP_LIMIT_S = 60.0


class Service:
    """`python -m supervisor run` on a configuration; output goes to a file, which `log` reads."""

    def __init__(
        self, folder: Path, dsn: str, config: str, *, tasks: str | None = None, app_dir: Path | None = None
    ) -> None:
        """Write `config` (TOML without the database) and, as module `tasks`, the handlers."""
        self.folder = folder
        self.dsn = dsn
        self.app_dir = app_dir or folder
        self.config = folder / "supervisor.toml"
        self.config.write_text(textwrap.dedent(config))
        if tasks is not None:
            (folder / "tasks.py").write_text(textwrap.dedent(tasks))
        self.log_file = folder / "service.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, env: dict[str, str] | None = None, within: Sequence[str] = ()) -> Service:
        """Start it, by the program `within` where one is named; returns at once."""
        command = [*within, sys.executable, "-m", "supervisor", "run", "--config", str(self.config)]
        command += ["--app-dir", str(self.app_dir), *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("SUPERVISOR_")}
        environment |= {"SUPERVISOR_DATABASE__DSN": self.dsn, **(env or {})}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The parent's process."""
        assert self._process is not None, "start it first"
        return self._process

    @property
    def pid(self) -> int:
        """The parent's pid."""
        return self.process.pid

    @property
    def log(self) -> str:
        """All that it and its children wrote so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def signal(self, signum: int) -> None:
        """Send a signal to the parent alone."""
        self.process.send_signal(signum)

    def wait_for_log(self, text: str, timeout_s: float = 90.0) -> None:
        """Wait until `text` stands in the log."""
        eventually(
            lambda: text in self.log or self.process.poll() is not None,
            timeout_s=timeout_s,
            what=f"{text!r} in the log",
        )
        assert text in self.log, f"it ended with {self.process.returncode}:\n{self.log[-4000:]}"

    def wait(self, timeout_s: float = STOP_LIMIT_S) -> int:
        """Wait for its end; gives the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log[-4000:]}") from error

    def stop(self, timeout_s: float = STOP_LIMIT_S) -> int:
        """TERM, and wait; gives the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL the parent and reap it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Whatever happened: nothing stays."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

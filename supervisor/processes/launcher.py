"""Start one process: exec of a fresh interpreter with two private pipes, a stack memfd and its own process group.

Never fork without exec, and only from the main thread: the child's PDEATHSIG fires when the *thread* that spawned it
ends. `Launcher` is the seam for another way to start children.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from shared.wire import startmark
from supervisor.processes import marks

PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
_TITLE_ROOM: Final = "." * 80  # a process title cannot be longer than the command line was
CHILD_MAIN: Final = PACKAGE_ROOT / "child" / "__main__.py"


@dataclass(slots=True, kw_only=True)
class Launched:
    """A process and our ends of what connects us with it. The owner closes them."""

    process: subprocess.Popen[bytes]
    pid: int
    pidfd: int
    from_child_fd: int
    to_child_fd: int
    output_fd: int | None  # None: inherited
    stack_fd: int


class Launcher(Protocol):
    """Starts children."""

    def launch(self, *, queue: str, mark: str, capture: bool) -> Launched:
        """Start a process. Raises `OSError` when the system cannot; nothing is left open then."""
        ...


class PopenLauncher:
    """`subprocess.Popen` of `child/__main__.py`, or of another program that speaks the protocol."""

    def __init__(self, *, child_main: Path = CHILD_MAIN, interpreter: str = sys.executable) -> None:
        """Keep the program; nothing is started."""
        self._child_main = child_main
        self._interpreter = interpreter

    def launch(self, *, queue: str, mark: str, capture: bool) -> Launched:
        """See `Launcher.launch`."""
        with ExitStack() as undo, ExitStack() as child_ends:
            from_child_fd, child_out_fd = _pipe(undo, child_ends)
            os.set_blocking(from_child_fd, False)
            child_in_fd, to_child_fd = _pipe(child_ends, undo)
            os.set_blocking(to_child_fd, False)
            stack_fd = os.memfd_create("pgmq-supervisor-stack", os.MFD_CLOEXEC)
            undo.callback(os.close, stack_fd)
            startmark.make_room(stack_fd)
            fcntl.fcntl(stack_fd, fcntl.F_SETFL, os.O_APPEND)  # we truncate; what comes later must go to the new end
            output_fd: int | None = None
            output_end: int | None = None
            if capture:
                output_fd, output_end = _pipe(undo, child_ends)
                os.set_blocking(output_fd, False)
            process = subprocess.Popen(
                [
                    self._interpreter,
                    "-u",
                    "-P",
                    str(self._child_main),
                    str(child_in_fd),
                    str(child_out_fd),
                    str(stack_fd),
                    str(os.getpid()),
                    queue,
                    _TITLE_ROOM,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                close_fds=True,
                pass_fds=(child_in_fd, child_out_fd, stack_fd),
                process_group=0,
                env={**os.environ, "SPT_NOENV": "1", marks.VARIABLE: mark},
            )
            pidfd = self._open_pidfd(process)
            undo.pop_all()
        return Launched(
            process=process,
            pid=process.pid,
            pidfd=pidfd,
            from_child_fd=from_child_fd,
            to_child_fd=to_child_fd,
            output_fd=output_fd,
            stack_fd=stack_fd,
        )

    @staticmethod
    def _open_pidfd(process: subprocess.Popen[bytes]) -> int:
        try:
            return os.pidfd_open(process.pid)
        except OSError:  # out of descriptors: it cannot be watched, so it must not live
            process.kill()
            process.wait()
            raise


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Make a pipe; each end is closed with its owner."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd

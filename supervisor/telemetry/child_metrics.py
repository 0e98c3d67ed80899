"""The folder in which children keep their metrics: who may write which files, and their sum at a scrape.

An identity is a small number that belongs to one living process and is given to the next one after its death. So the
number of files follows the number of children, never the number of restarts, and a counter goes on where it stood.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector

from supervisor.telemetry.exposition import PREFIX
from supervisor.telemetry.mapped_files import CorruptFileError, Sum, read_entries

_PREFIX: Final = "pgmq-supervisor-metrics-"
_LOCK: Final = "lock"
_KEPT: Final = "kept"  # the identity that inherits what was in a file that became unreadable
_KINDS: Final = ("counter", "gauge", "histogram", "summary")
_MAX_FILES: Final = 4_096

Entries = dict[str, tuple[float, float]]


class ChildMetrics(Collector):
    """One folder of one run. `collect` may run on any thread."""

    def __init__(self, base: Path, *, on_skipped: Callable[[str, str], None]) -> None:
        """Make the folder inside `base`, remove those of runs that are over. `on_skipped(file, why)`: unreadable."""
        self._on_skipped = on_skipped
        self._guard = threading.Lock()
        self._taken: dict[int, int] = {}  # child → identity
        self._last_good: dict[str, Entries] = {}
        remove_folders_of_the_dead(base)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def acquire(self, child: int) -> str:
        """Give a child that is about to start the lowest identity that no living process has."""
        taken = set(self._taken.values())
        identity = next(number for number in range(len(taken) + 1) if number not in taken)
        self._taken[child] = identity
        with self._guard:
            for file in self._files_of(identity):
                try:
                    self._read(file)
                except CorruptFileError as error:
                    self._put_aside(file, str(error))  # or the new process would stumble over it
        return str(identity)

    def release(self, child: int) -> None:
        """Take the identity back, once the process is dead for certain. Gauges of living children lose its part."""
        identity = self._taken.pop(child, None)
        if identity is None:
            return
        with self._guard:
            for file in self._files_of(identity):
                if file.name.startswith("gauge_live"):
                    file.unlink(missing_ok=True)
                    self._last_good.pop(file.name, None)

    def collect(self) -> Iterable[Metric]:
        """Add all files up. Unreadable ones are skipped; names of ours are not theirs to use."""
        with self._guard:
            total = self._sum()
            if total is None:  # something was put aside and its numbers lie elsewhere now
                total = self._sum() or Sum()
        return [metric for metric in total.metrics() if not metric.name.startswith(PREFIX)]

    def _sum(self) -> Sum | None:
        """Add all files up; None when one of them had to be put aside."""
        total = Sum()
        complete = True
        for file in self._files():
            kind, mode, _ = split_name(file.name)
            try:
                total.add(kind, mode, self._read(file))
            except CorruptFileError as error:
                self._put_aside(file, str(error))
                complete = False
        return total if complete else None

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _files(self) -> list[Path]:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        return [self.folder / name for name in names if split_name(name)[0] in _KINDS][:_MAX_FILES]

    def _files_of(self, identity: int) -> list[Path]:
        return [file for file in self._files() if split_name(file.name)[2] == str(identity)]

    def _read(self, file: Path) -> Entries:
        """Read one file and remember it. Raises `CorruptFileError`."""
        try:
            entries = read_entries(file)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CorruptFileError(error.strerror or "cannot be read") from error
        self._last_good[file.name] = entries
        return entries

    def _put_aside(self, file: Path, why: str) -> None:
        """Remove an unreadable file; what was read from it last goes on to count, so that no counter falls."""
        self._on_skipped(file.name, why)
        try:
            file.unlink(missing_ok=True)
        except OSError:
            shutil.rmtree(file, ignore_errors=True)  # a folder of that name
        entries = self._last_good.pop(file.name, None)
        kind, _, identity = split_name(file.name)
        if not entries or kind == "gauge" or identity == _KEPT:
            return
        opened: Any = MmapedDict  # the library has no types here
        kept = opened(str(self.folder / f"{kind}_{_KEPT}.db"))
        try:
            for key, (value, _) in entries.items():
                kept.write_value(key, kept.read_value(key)[0] + value, 0.0)
        finally:
            kept.close()


def split_name(name: str) -> tuple[str, str, str]:
    """Split a file's name into kind, mode (of gauges) and identity; kind is empty for what is no metrics file."""
    stem, dot, ending = name.rpartition(".")
    parts = stem.split("_", 2 if stem.startswith("gauge_") else 1)
    if dot and ending == "db":
        match parts:
            case ["gauge", mode, identity]:
                return "gauge", mode, identity
            case [kind, identity] if kind != "gauge":
                return kind, "", identity
    return "", "", ""


def remove_folders_of_the_dead(base: Path) -> None:
    """Remove the folders of earlier runs: a living run holds the lock in its folder."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)

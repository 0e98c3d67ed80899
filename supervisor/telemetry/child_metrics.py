"""The folder in which children keep their metrics: what is in it, and its sum at a scrape.

A file carries an identity (queue and a small number) that belongs to one living process and is given to the next one
after its death. So the number of files follows the number of children, never the number of restarts, and a counter goes
on where it stood.
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
_CORRUPT: Final = ".corrupt"
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
        self._last_good: dict[str, Entries] = {}
        remove_folders_of_the_dead(base)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def forget(self, pid: int) -> None:
        """A child has died: what it said about itself, by gauges of living processes, is over."""
        with self._guard:
            for name in self._names():
                if name.startswith("gauge_live") and name.endswith(f".{pid}.db"):
                    (self.folder / name).unlink(missing_ok=True)
                    self._last_good.pop(name, None)

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
        names = self._names()
        for name in names:
            if name.endswith(_CORRUPT):  # a child put it aside itself, before it began a new one
                self._put_aside(name, "found unreadable by a child")
                complete = False
        for name in names:
            kind, mode, _ = split_name(name)
            if kind not in _KINDS:
                continue
            try:
                entries = self._read(name)
                total.add(kind, mode, entries)
                self._last_good[name] = entries
            except CorruptFileError as error:
                self._put_aside(name, str(error))
                complete = False
        return total if complete else None

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))[:_MAX_FILES]
        except OSError:
            return []

    def _read(self, name: str) -> Entries:
        """Read one file. Raises `CorruptFileError`."""
        try:
            return read_entries(self.folder / name)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CorruptFileError(error.strerror or "cannot be read") from error

    def _put_aside(self, found: str, why: str) -> None:
        """Remove an unreadable file; what was read from it last goes on to count, so that no counter falls."""
        self._on_skipped(found, why)
        file = self.folder / found
        try:
            file.unlink(missing_ok=True)
        except OSError:
            shutil.rmtree(file, ignore_errors=True)  # a folder of that name
        name = found.removesuffix(_CORRUPT)
        entries = self._last_good.pop(name, None)
        kind, _, identity = split_name(name)
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

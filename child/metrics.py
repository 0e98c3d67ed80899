"""A handler's own Prometheus metrics, written to files that the parent adds up. Costs nothing without them.

`keep_metrics_apart` only leaves a note for the import system: when the handler imports prometheus_client, the class
behind every counter, gauge and histogram is replaced by one that keeps its number in a mapped file, before any metric
can be made.
prometheus_client is never imported for its own sake, no environment variable is set (a program that the handler starts
would inherit it, and write files of its own), and a forked copy of this process counts in its own memory only.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["keep_metrics_apart"]

_TARGET = "prometheus_client.values"


def keep_metrics_apart(metrics_dir: str | None, identity: str | None) -> None:
    """Send the metrics of this process to files `<kind>_<identity>.db` in `metrics_dir`; without one, do nothing.

    `identity` must belong to no other living process. Call before the handler is imported. Never raises.
    """
    if not metrics_dir or not identity:
        return
    loaded = sys.modules.get(_TARGET)
    if loaded is not None:
        _replace_value_class(loaded, metrics_dir, identity)
    else:
        sys.meta_path.insert(0, _Finder(metrics_dir, identity))


class _Finder:
    """Finds one module, once, and puts our loader around its own."""

    def __init__(self, metrics_dir: str, identity: str) -> None:
        self._where = (metrics_dir, identity)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader, *self._where)
            spec.loader = loader
        return spec


class _Loader:
    """Runs the module as its own loader does, then replaces the class of values."""

    def __init__(self, inner: Any, metrics_dir: str, identity: str) -> None:
        self._inner = inner
        self._where = (metrics_dir, identity)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # resources, source text, is_package

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _replace_value_class(module, *self._where)


def _replace_value_class(values: Any, metrics_dir: str, identity: str) -> None:
    """Put our class in place; a version of the library that lacks what we need keeps its own."""
    if hasattr(values, "MmapedDict") and hasattr(values, "mmap_key"):
        values.ValueClass = _make_value_class(_Files(values.MmapedDict, metrics_dir, identity), values.mmap_key)


class _Files:
    """The mapped files of this process, one a kind of metric, opened when the first metric of the kind is made."""

    def __init__(self, mapped_dict: Any, metrics_dir: str, identity: str) -> None:
        self._mapped_dict = mapped_dict
        self._metrics_dir = metrics_dir
        self._identity = identity
        self._open: dict[str, Any] = {}
        self.lock = Lock()
        self.is_ours = True
        os.register_at_fork(after_in_child=self._forget)

    def of(self, kind: str) -> Any:
        """Return the file of a kind, or None where there is none: a copy, or a disk that refuses."""
        if not self.is_ours:
            return None
        if kind not in self._open:
            # What a process says about itself ends with it: the parent finds such files by the pid and removes them.
            ending = f".{os.getpid()}" if kind.startswith("gauge_live") else ""
            path = os.path.join(self._metrics_dir, f"{kind}_{self._identity}{ending}.db")
            try:
                if not _is_sound(path):
                    os.replace(path, f"{path}.corrupt")  # the parent counts it, and goes on with what it read last
                self._open[kind] = self._mapped_dict(path)
            except Exception:  # noqa: BLE001 - a metric that cannot be kept must not keep the handler from its work
                self._open[kind] = None
        return self._open[kind]

    def _forget(self) -> None:
        """In a forked copy: the mapping is shared with the original, so writing there would change its numbers."""
        self.is_ours = False
        self.lock = Lock()


def _is_sound(path: str) -> bool:
    """Whether the library can read the file; a forged length would make it read for ever. See the parent's reader."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return True
    used = int.from_bytes(data[:4], sys.byteorder, signed=True)
    position = 8
    while 0 <= position < used <= len(data):
        length = int.from_bytes(data[position : position + 4], sys.byteorder, signed=True)
        if length < 0:
            return False
        position += 4 + length + (8 - (length + 4) % 8) + 16
    return not data or used == 0 or position == used <= len(data)


def _make_value_class(files: _Files, mmap_key: Any) -> type:
    """Build the class that prometheus_client calls for each sample of a metric."""

    class FileValue:
        """A number in a mapped file. What an earlier process with this identity counted is continued."""

        _multiprocess = True

        def __init__(
            self,
            typ: str,
            metric_name: str,
            name: str,
            labelnames: Sequence[str],
            labelvalues: Sequence[str],
            help_text: str,
            multiprocess_mode: str = "",
            **_: Any,
        ) -> None:
            # A gauge for which nothing else was chosen is added up too, over the children that live.
            mode = "livesum" if multiprocess_mode in {"", "all"} else multiprocess_mode
            self._key = mmap_key(metric_name, name, labelnames, labelvalues, help_text)
            self._value = self._timestamp = 0.0
            with files.lock:
                self._file = files.of(f"gauge_{mode}" if typ == "gauge" else typ)
                if self._file is not None:
                    self._value, self._timestamp = self._file.read_value(self._key)

        def inc(self, amount: float) -> None:
            with files.lock:
                self._write(self._value + amount, 0.0)

        def set(self, value: float, timestamp: float | None = None) -> None:
            with files.lock:
                self._write(value, timestamp or 0.0)

        def get(self) -> float:
            return self._value

        def set_exemplar(self, exemplar: Any) -> None:
            """Exemplars do not fit into the files."""

        def get_exemplar(self) -> None:
            return None

        def _write(self, value: float, timestamp: float) -> None:
            self._value, self._timestamp = value, timestamp
            if self._file is not None and files.is_ours:
                self._file.write_value(self._key, value, timestamp)

    return FileValue

"""Read the files in which children keep their metrics, trusting nothing in them, and add them up.

The format is prometheus_client's: a 4-byte length in use, 4 bytes of padding, then entries of a 4-byte key length, the
key (JSON: metric, sample, labels, help; padded to 8 bytes), the value and a timestamp as doubles. A child may be
killed while it writes, and a hostile handler may write anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

MAX_FILE_BYTES: Final = 4 << 20
_LENGTH: Final = struct.Struct("i")
_DOUBLES: Final = struct.Struct("dd")

Labels = tuple[tuple[str, str], ...]


class CorruptFileError(Exception):
    """The file is not what a child's metrics file looks like."""


def read_entries(path: Path) -> dict[str, tuple[float, float]]:
    """Return key → (value, timestamp). Raises `CorruptFileError`, and OSError where there is no file."""
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            if not head:
                return {}  # just made, nothing in it yet
            raise CorruptFileError("shorter than its header")
        used = _LENGTH.unpack_from(head)[0]
        if used == 0:
            return {}
        if not 8 <= used <= MAX_FILE_BYTES:
            raise CorruptFileError(f"says that {used} bytes are in use")
        data = head + file.read(used - 8)
    if len(data) < used:
        raise CorruptFileError("shorter than what it says is in use")
    entries: dict[str, tuple[float, float]] = {}
    position = 8
    while position < used:
        (length,) = _LENGTH.unpack_from(data, position) if position + 4 <= used else (-1,)
        padded = length + (8 - (length + 4) % 8)
        end = position + 4 + padded + 16
        if length < 0 or end > used:
            raise CorruptFileError(f"an entry at byte {position} does not fit")
        try:
            key = data[position + 4 : position + 4 + length].decode()
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"the key at byte {position} is no text") from error
        value, timestamp = _DOUBLES.unpack_from(data, end - 16)
        entries[key.rstrip()] = (value, timestamp)
        position = end
    return entries


@dataclass(slots=True)
class _Family:
    kind: str
    mode: str
    help: str
    samples: dict[tuple[str, Labels], tuple[float, float]] = field(default_factory=dict)


class Sum:
    """Adds files up: counters, histograms and summaries always, gauges in the mode that their metric chose."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._keys: dict[str, tuple[str, str, Labels, str]] = {}

    def add(self, kind: str, mode: str, entries: dict[str, tuple[float, float]]) -> None:
        """Add one file. Raises `CorruptFileError` before anything was added when a key makes no sense."""
        parsed = [(self._parse(key), value) for key, value in entries.items()]
        for (metric, sample, labels, text), found in parsed:
            family = self._families.get(metric)
            if family is None:
                family = self._families[metric] = _Family(kind, mode, text)
            if family.kind != kind:
                continue  # two queues use one name for two things: the first stands
            have = family.samples.get((sample, labels))
            family.samples[sample, labels] = found if have is None else _combined(family.mode, have, found)

    def metrics(self) -> Iterable[Metric]:
        """Return what was added up as families for the exposition."""
        for name, family in self._families.items():
            try:
                metric = Metric(name, family.help, family.kind)
            except ValueError:
                continue  # no name that Prometheus takes
            if family.kind == "histogram":
                _add_histogram(metric, family)
            else:
                for (sample, labels), (value, _) in family.samples.items():
                    metric.add_sample(sample, dict(labels), value)
            yield metric

    def _parse(self, key: str) -> tuple[str, str, Labels, str]:
        known = self._keys.get(key)
        if known is None:
            try:
                metric, sample, labels, text = json.loads(key)
                known = (
                    str(metric),
                    str(sample),
                    tuple(sorted((str(k), str(v)) for k, v in labels.items())),
                    str(text),
                )
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise CorruptFileError("a key is not of the library's form") from error
            self._keys[key] = known
        return known


def _combined(mode: str, have: tuple[float, float], new: tuple[float, float]) -> tuple[float, float]:
    """Combine the values of two children."""
    match mode.removeprefix("live"):
        case "min":
            return min(have, new)
        case "max":
            return max(have, new)
        case "mostrecent":
            return new if new[1] > have[1] else have
        case _:
            return have[0] + new[0], 0.0


def _add_histogram(metric: Metric, family: _Family) -> None:
    """Buckets lie in the files one by one; the wire format wants each to contain those below it."""
    buckets: dict[Labels, list[tuple[float, str, float]]] = {}
    sums: list[tuple[str, Labels, float]] = []
    for (sample, labels), (value, _) in family.samples.items():
        bound = next((text for name, text in labels if name == "le"), None)
        if bound is None:
            sums.append((sample, labels, value))
            continue
        try:
            number = float(bound)
        except ValueError:
            continue
        others = tuple(label for label in labels if label[0] != "le")
        buckets.setdefault(others, []).append((number, bound, value))
    for others, found in buckets.items():
        below = 0.0
        for _, bound, value in sorted(found):
            below += value
            metric.add_sample(f"{metric.name}_bucket", {**dict(others), "le": bound}, below)
        metric.add_sample(f"{metric.name}_count", dict(others), below)
        for sample, labels, value in sums:
            if labels == others:
                metric.add_sample(sample, dict(labels), value)

"""A happening as a flat record of plain values: what the JSON log and the user's sink show."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING

from supervisor.core.types import DeathFacts, ErrorInfo
from supervisor.telemetry.catalogue import CATALOGUE
from supervisor.telemetry.facts import AnyHappening, Noted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Plain = str | int | float | bool | None
Record = dict[str, object]


_NAMES: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, looked up once."""
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(field.name for field in fields(kind))
    return names


def event_name(happening: AnyHappening) -> str:
    """Name the log event of a happening."""
    if isinstance(happening, Noted):
        return happening.topic
    return CATALOGUE[type(happening)].event


def fields_of(happening: AnyHappening) -> Record:
    """Return the fields of a happening, nested values flattened, without what is None."""
    if isinstance(happening, Noted):
        return dict(happening.fields)
    record: Record = {}
    for name in _field_names(type(happening)):
        value = getattr(happening, name)
        match value:
            case None:
                continue
            case ErrorInfo():
                record["error_type"] = value.type
                record["error"] = value.message
                record["traceback"] = value.traceback
            case DeathFacts():
                record.update(_death_fields(value))
            case Enum():
                record[name] = value.value
            case float():
                record[name] = round(value, 6)
            case _:
                record[name] = value
    return record


def _death_fields(facts: DeathFacts) -> Record:
    """Flatten what is known of a child's end."""
    record: Record = {"peak_rss_kb": facts.max_rss_kb, "cpu_s": round(facts.cpu_s, 3)}
    if facts.signal is not None:
        record["signal"] = facts.signal
    if facts.exit_code is not None:
        record["exit_code"] = facts.exit_code
    if facts.oom:
        record["oom"] = True
    if facts.by_guard:
        record["by_guard"] = True
    if facts.stack:
        record["stack"] = facts.stack
    if facts.output_tail:
        record["output_tail"] = facts.output_tail
    return record


def sink_record(happening: AnyHappening, *, at: float) -> Record:
    """Return the whole record for the user's sink: `event`, `time` (seconds since the epoch), then the fields."""
    return {"event": event_name(happening), "time": round(at, 6), **fields_of(happening)}

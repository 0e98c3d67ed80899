"""From sources to a checked `Config`: validate every section and queue, apply the rules, collect all problems."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError as PydanticError
from pydantic_core import ErrorDetails

from shared.errors import ValidationError
from shared.naming import validate_queue_name
from supervisor.config.advice import advise
from supervisor.config.config import Config
from supervisor.config.dsn import dsn_refusal
from supervisor.config.models import (
    SECTIONS,
    ControlSection,
    DatabaseSection,
    EventsSection,
    HttpSection,
    LogSection,
    QueueSection,
    RetrySection,
    Section,
    ShutdownSection,
)
from supervisor.config.problems import InvalidConfiguration, Problem, did_you_mean, dotted, shown
from supervisor.config.problems import Path as KeyPath
from supervisor.config.rules import Breach, control_breaches, queue_breaches, queues_breaches
from supervisor.config.sources import Overrides, Tree, gather

__all__ = ["NO_DATABASE", "Examined", "examine", "load"]

NO_DATABASE = (
    'give --dsn, SUPERVISOR_DSN, [database] dsn in the file, or DATABASE_URL; "embedded" starts a server of its own'
)
_S = TypeVar("_S", bound=Section)
_TABLE = "write a table: [section], then one key = value a line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A configuration looked at: `config` is None where there are problems."""

    config: Config | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def load(
    overrides: Overrides,
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    needs_dsn: bool = True,
    needs_queues: bool = False,
) -> Config:
    """Read and check the configuration. Raises `InvalidConfiguration` with every problem at once."""
    examined = examine(overrides, environ=environ, cwd=cwd, needs_dsn=needs_dsn, needs_queues=needs_queues)
    if examined.config is None:
        raise InvalidConfiguration(examined.problems)
    return examined.config


def examine(
    overrides: Overrides,
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    needs_dsn: bool = True,
    needs_queues: bool = False,
) -> Examined:
    """Read and check the configuration; problems and warnings come back as values."""
    folder = Path.cwd() if cwd is None else cwd
    tree = gather(overrides, environ, folder)
    checker = _Checker(tree)
    config = checker.build(_app_dir(tree, overrides.app_dir, folder))
    if not tree.problems:
        _completeness(tree, needs_dsn=needs_dsn, needs_queues=needs_queues)
    if tree.problems:
        return Examined(config=None, problems=tuple(tree.problems), warnings=tuple(tree.warnings))
    warnings = (*tree.warnings, *(checker.problem(breach) for breach in advise(config)))
    return Examined(config=config, problems=(), warnings=warnings)


def _app_dir(tree: Tree, named: str | None, cwd: Path) -> Path:
    """Resolve where handlers are imported from."""
    path = cwd if named is None else (cwd / named).resolve()
    if not path.is_dir():
        reason = "is no folder" if path.exists() else "does not exist"
        tree.problems.append(
            Problem(
                where="--app-dir",
                key="",
                value=shown((), named),
                reason=reason,
                remedy="name the folder from which `import` finds the modules of your handlers",
            )
        )
    return path


def _completeness(tree: Tree, *, needs_dsn: bool, needs_queues: bool) -> None:
    """What a command cannot do without."""
    if needs_dsn and tree.get(("database", "dsn")) is None:
        tree.problems.append(
            Problem(
                where=tree.base,
                key="database.dsn",
                value=None,
                reason="no database is named",
                remedy=NO_DATABASE,
            )
        )
    if needs_queues and not tree.get(("queues",)):
        tree.problems.append(
            Problem(
                where=tree.base,
                key="queues",
                value=None,
                reason="no queue is configured",
                remedy='add [queues.NAME] with handler = "package.module:function", or --queue NAME=MODULE:FUNCTION',
            )
        )


class _Checker:
    """Validates one tree; problems are added to it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._refused: set[KeyPath] = set()  # keys that rules must not judge any more

    def build(self, app_dir: Path) -> Config:
        """Build the configuration. Where there are problems, what was refused has its default in it."""
        tree = self._tree
        self._unknown_sections()
        control = self._section("control", ControlSection)
        queues = dict(self._queues())
        self._apply(control_breaches(control))
        for name, queue in queues.items():
            self._apply(queue_breaches(name, queue))
        self._apply(queues_breaches(queues))
        database = self._section("database", DatabaseSection)
        self._check_dsns(database)
        return Config(
            app_dir=app_dir,
            source=tree.file,
            dsn_origin=tree.origin(("database", "dsn")) if database.dsn is not None else None,
            database=database,
            shutdown=self._section("shutdown", ShutdownSection),
            http=self._section("http", HttpSection) if tree.get(("http",)) is not None else None,
            log=self._section("log", LogSection),
            control=control,
            events=self._section("events", EventsSection),
            queues=MappingProxyType(queues),
        )

    def problem(self, breach: Breach) -> Problem:
        """Give a broken rule its place."""
        return self._problem(breach.path, breach.reason, breach.remedy)

    def _problem(self, path: KeyPath, reason: str, remedy: str) -> Problem:
        value = self._tree.get(path)
        return Problem(
            where=self._tree.origin(path),
            key=dotted(path),
            value=None if value is None else shown(path, value),
            reason=reason,
            remedy=remedy,
        )

    def _refuse(self, path: KeyPath, reason: str, remedy: str) -> None:
        self._refused.add(path)
        self._tree.problems.append(self._problem(path, reason, remedy))

    def _apply(self, breaches: Iterable[Breach]) -> None:
        for breach in breaches:
            if not self._refused.intersection(breach.looked_at):
                self._refuse(breach.path, breach.reason, breach.remedy)

    def _unknown_sections(self) -> None:
        known = (*SECTIONS, "queues")
        for key in self._tree.values:
            if key not in known:
                self._refuse((key,), "unknown section", _unknown_remedy(key, known))

    def _section(self, name: str, model: type[_S]) -> _S:
        return self._validated((name,), model, self._tree.get((name,)))

    def _queues(self) -> Iterator[tuple[str, QueueSection]]:
        queues = self._tree.get(("queues",))
        if queues is None:
            return
        if not isinstance(queues, dict):
            self._refuse(("queues",), "is no table", "write [queues.NAME], then one key = value a line")
            return
        for name, table in queues.items():
            path = ("queues", name)
            try:
                validate_queue_name(name)
            except ValidationError as error:
                self._refuse(path, error.message, error.remedy or "use a-z, 0-9 and _")
            queue = self._validated(path, QueueSection, table)
            if path not in self._refused:
                yield name, queue

    def _validated(self, path: KeyPath, model: type[_S], data: Any) -> _S:
        """Validate one table; what is refused is reported, taken out, and the rest validated once more."""
        if data is None:
            data = {}
        if not isinstance(data, dict):
            self._refuse(path, "is no table", _TABLE)
            return model.model_validate(_placeholder(model, {}))
        try:
            return model.model_validate(data)
        except PydanticError as error:
            details = error.errors(include_url=False)
        remaining = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
        for detail in details:
            place = tuple(str(part) for part in detail["loc"])
            self._refuse((*path, *place), *_complaint(detail, model))
            _take_out(remaining, place)
        return model.model_validate(_placeholder(model, remaining))

    def _check_dsns(self, database: DatabaseSection) -> None:
        for key, dsn in (("dsn", database.dsn), ("listen_dsn", database.listen_dsn)):
            complaint = None if dsn is None else dsn_refusal(dsn, embedded_allowed=key == "dsn")
            if complaint is not None:
                self._refuse(("database", key), *complaint)


def _placeholder(model: type[Section], table: dict[str, Any]) -> dict[str, Any]:
    """Put something where a key without a default was refused: the rest can then still be judged by the rules."""
    return {"handler": "refused:refused"} | table if model is QueueSection else table


def _take_out(table: dict[str, Any], place: KeyPath) -> None:
    """Remove one refused key."""
    if len(place) == 2 and isinstance(table.get(place[0]), dict):
        table[place[0]].pop(place[1], None)
    else:
        table.pop(place[0], None)


def _complaint(detail: ErrorDetails, model: type[Section]) -> tuple[str, str]:
    """Turn an error of pydantic into reason and remedy."""
    place = tuple(str(part) for part in detail["loc"])
    match detail["type"]:
        case "refused":
            context = detail.get("ctx", {})
            return str(context["reason"]), str(context["remedy"])
        case "extra_forbidden":
            known = RetrySection if len(place) == 2 else model
            return "unknown key", _unknown_remedy(place[-1], known.model_fields)
        case "missing":
            return "is missing", f'add {place[-1]} = "package.module:function"'
        case "model_type" | "model_attributes_type" | "dict_type":
            return "is no table", 'write { base = "1s", factor = 2, max = "10m", jitter = true }'
        case _:
            return detail["msg"], "see docs/configuration.md"


def _unknown_remedy(key: str, known: Iterable[str]) -> str:
    """Guess what was meant, else list what there is."""
    names = list(known)
    meant = did_you_mean(key, names)
    return f'did you mean "{meant}"?' if meant else f"known here: {', '.join(names)}"

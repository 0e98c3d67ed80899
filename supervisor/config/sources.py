"""Where configuration comes from: a TOML file, the environment, flags. One tree results, and who said what."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor.config.models import SECTIONS, QueueSection, RetrySection
from supervisor.config.problems import Path as KeyPath
from supervisor.config.problems import Problem, did_you_mean, shown
from supervisor.config.values import Text

__all__ = ["DEFAULT_FILE", "Overrides", "Tree", "gather"]

DEFAULT_FILE = "supervisor.toml"

_PREFIX = "SUPERVISOR_"
_RETRY_KEYS = tuple(RetrySection.model_fields)
_QUEUE_KEYS = tuple(QueueSection.model_fields)
_TOML_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the command line says. Paths are as typed, relative to the working directory."""

    config: str | None = None
    dsn: str | None = None
    queues: tuple[str, ...] = ()  # "NAME=MODULE:FUNCTION"
    concurrency: int | None = None  # of every queue
    app_dir: str | None = None
    socket: str | None = None


@dataclass(slots=True)
class Tree:
    """All values by path, and where each came from. Later sources are put in over earlier ones."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    file: Path | None = None
    base: str = "defaults"  # where a key belongs that nobody has said: the file's name as typed

    def put(self, path: KeyPath, value: object, origin: str) -> None:
        """Set one value. A parent of the wrong type stays: it is reported as what it is."""
        node = self.values
        for part in path[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                return
            node = child
        node[path[-1]] = value
        self.origins[path] = origin

    def get(self, path: KeyPath) -> Any:
        """Look one value up; None where there is none."""
        node: Any = self.values
        for part in path:
            if not isinstance(node, dict) or part not in node:
                return None
            node = node[part]
        return node

    def origin(self, path: KeyPath) -> str:
        """Who said this value; for what nobody said, who said something nearest to it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        if path[:1] != ("queues",) or self.get(path[:2]) is None or self.file is not None:
            return self.base
        return next((who for key, who in self.origins.items() if key[:2] == path[:2]), self.base)


def gather(overrides: Overrides, environ: Mapping[str, str], cwd: Path) -> Tree:
    """Read all sources: flag > environment > file."""
    tree = Tree()
    _read_file(tree, overrides.config, cwd)
    _read_environment(tree, environ)
    _read_flags(tree, overrides)
    _choose_dsn(tree, overrides, environ)
    return tree


def _read_file(tree: Tree, named: str | None, cwd: Path) -> None:
    """Read the named file, or the default one if it is there."""
    label = DEFAULT_FILE if named is None else named
    path = cwd / label
    if named is None and not path.exists():
        return
    tree.base = label
    tree.file = path.resolve()
    try:
        data = path.read_bytes()
    except OSError as error:
        remedy = f"give --config the name of a readable TOML file, or leave it out to use ./{DEFAULT_FILE}"
        reason = f"cannot be read: {error.strerror or error}"
        tree.problems.append(Problem(where=label, key="", value=None, reason=reason, remedy=remedy))
        return
    try:
        tree.values = tomllib.loads(data.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        _broken(tree, label, line, column, "is not UTF-8 text", "save the file as UTF-8")
    except tomllib.TOMLDecodeError as error:
        line, column = _toml_place(str(error), data)
        reason = "is not TOML: " + _TOML_PLACE.sub("", str(error))
        _broken(tree, label, line, column, reason, "mend the line; texts need quotes, tables are written [section]")
    except RecursionError:
        _broken(tree, label, 1, 1, "is nested too deeply", "use the sections of docs/configuration.md")


def _broken(tree: Tree, label: str, line: int, column: int, reason: str, remedy: str) -> None:
    where = f"{label}, line {line}, column {column}"
    tree.problems.append(Problem(where=where, key="", value=None, reason=reason, remedy=remedy))


def _toml_place(message: str, data: bytes) -> tuple[int, int]:
    """Line and column of a syntax error, from 1. An error at the end of the document stands behind its last line."""
    found = _TOML_PLACE.search(message)
    if found is not None and found.group(1):
        return int(found.group(1)), int(found.group(2))
    lines = data.decode("utf-8", errors="replace").rstrip("\r\n").split("\n")
    return len(lines), len(lines[-1].rstrip("\r")) + 1


def _read_environment(tree: Tree, environ: Mapping[str, str]) -> None:
    """Take `SUPERVISOR_<SECTION>__...`, names without regard to case; the rest that starts so is not ours.

    A variable that is set to nothing counts as unset: compose files and unit files pass such on.
    """
    seen: dict[KeyPath, tuple[str, str]] = {}
    for variable in sorted(environ):
        if not variable.upper().startswith(_PREFIX) or not environ[variable]:
            continue
        section, separator, rest = variable[len(_PREFIX) :].lower().partition("__")
        if not separator:
            continue
        if section not in SECTIONS and section != "queues":
            _unknown_section(tree, variable, section)
            continue
        path = (section, rest) if section != "queues" else _queue_path(rest)
        value = environ[variable]
        if path in seen and seen[path][1] != value:
            reason = f"contradicts {seen[path][0]}, which differs in case only"
            tree.problems.append(
                Problem(
                    where=variable,
                    key=".".join(path),
                    value=shown(path, value),
                    reason=reason,
                    remedy="unset one of them",
                )
            )
            continue
        seen[path] = (variable, value)
        tree.put(path, _inline_table(value) if path[2:] == ("retry",) else Text(value), variable)


def _unknown_section(tree: Tree, variable: str, section: str) -> None:
    """Ignored, as docs/configuration.md says; worth a warning where it looks like a slip of the finger."""
    meant = did_you_mean(section, [*SECTIONS, "queues"])
    if meant:
        fixed = f"{_PREFIX}{meant.upper()}{variable[len(_PREFIX) + len(section) :]}"
        tree.warnings.append(
            Problem(
                where=variable,
                key="",
                value=None,
                reason="is ignored: there is no such section",
                remedy=f"did you mean {fixed}?",
            )
        )


def _queue_path(rest: str) -> KeyPath:
    """Split `NAME__KEY` or `NAME__RETRY__KEY`, from the right: a queue's name may itself have underscores."""
    for key in _RETRY_KEYS:
        name = rest.removesuffix(f"__retry__{key}")
        if name not in {rest, ""}:
            return ("queues", name, "retry", key)
    for key in _QUEUE_KEYS:
        name = rest.removesuffix(f"__{key}")
        if name not in {rest, ""}:
            return ("queues", name, key)
    name, separator, key = rest.rpartition("__")
    if not separator:
        return ("queues", rest)
    owner = name.removesuffix("__retry")
    return ("queues", name, key) if owner in {name, ""} else ("queues", owner, "retry", key)


def _inline_table(value: str) -> object:
    """Read `{ base = "1s", factor = 2 }`; what is none is left as text and refused later."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return Text(value)


def _read_flags(tree: Tree, overrides: Overrides) -> None:
    """Put --queue, --concurrency and --socket over everything."""
    for argument in overrides.queues:
        name, separator, handler = argument.partition("=")
        if not separator or not name.strip() or not handler.strip():
            tree.problems.append(
                Problem(
                    where="--queue",
                    key="",
                    value=shown((), argument),
                    reason="is not NAME=MODULE:FUNCTION",
                    remedy="write for example --queue orders=tasks:handle",
                )
            )
            continue
        tree.put(("queues", name.strip(), "handler"), Text(handler), "--queue")
    if overrides.concurrency is not None:
        for path in list(_queue_paths(tree)):
            tree.put((*path, "concurrency"), overrides.concurrency, "--concurrency")
    if overrides.socket is not None:
        tree.put(("control", "socket"), Text(overrides.socket), "--socket")


def _queue_paths(tree: Tree) -> Iterator[KeyPath]:
    queues = tree.get(("queues",))
    if isinstance(queues, dict):
        yield from (("queues", name) for name in queues)


def _choose_dsn(tree: Tree, overrides: Overrides, environ: Mapping[str, str]) -> None:
    """Decide the DSN: --dsn, SUPERVISOR_DSN, SUPERVISOR_DATABASE__DSN, the file, DATABASE_URL."""
    path = ("database", "dsn")
    short = next((name for name in sorted(environ) if name.upper() == "SUPERVISOR_DSN" and environ[name]), None)
    if overrides.dsn is not None:
        tree.put(path, Text(overrides.dsn), "--dsn")
    elif short is not None:
        tree.put(path, Text(environ[short]), short)
    elif tree.get(path) is None and environ.get("DATABASE_URL"):
        tree.put(path, Text(environ["DATABASE_URL"]), "DATABASE_URL")

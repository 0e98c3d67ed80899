"""What cannot start: one clear message with its remedy, the exit code of its kind, and nothing claimed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.cli import typed

NOWHERE = "postgresql://127.0.0.1:9/none?connect_timeout=2"


def test_bare_start(tmp_path: Path) -> None:
    """With neither a file nor a queue it explains itself."""
    done = typed(cwd=tmp_path)
    assert done.code == 2
    assert "no ./supervisor.toml here" in done.err
    assert "--queue orders=tasks:handle" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("frobnicate",), "No such command"),
        (("run", "--frobnicate"), "No such option"),
        (("--queue",), "requires an argument"),
        (("run", "--concurrency", "many"), "--concurrency"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
        (("--queue", "orders"), "NAME=MODULE:FUNCTION"),
        (("--queue", "Orders=t:h", "--dsn", NOWHERE), "upper-case"),
        (("--queue", "orders=t:h"), "no database is named"),
        (("--queue", "orders=t:h", "--dsn", "mysql://h/"), "not PostgreSQL"),
        (("--queue", "orders=t:h", "--dsn", NOWHERE, "--app-dir", "nowhere"), "does not exist"),
        (("--queue", "orders=t:h", "--dsn", NOWHERE, "--concurrency", "0"), "is below 1"),
        (("send",), "Missing argument"),
        (("send", "No-pe", "1", "--dsn", NOWHERE), "upper-case"),
        (("send", "q", "1", "--delay", "-5s", "--dsn", NOWHERE), "is negative"),
        (("send", "q", "1", "--delay", "9007199254741", "--dsn", NOWHERE), "is longer than"),
        (("send", "q", "1", "--headers", "[]", "--dsn", NOWHERE), "not a JSON object"),
        (("send", "q", "1", "--headers", "{", "--dsn", NOWHERE), "is not JSON"),
        (("queues", "create", "x" * 48, "--dsn", NOWHERE), "48 bytes"),
        (("dlq", "redrive", "q", "--dsn", NOWHERE), "which dead letters?"),
        (("dlq", "redrive", "q", "1", "--all", "--dsn", NOWHERE), "either MSG_ID"),
        (("dlq", "redrive", "q", "--all", "--rate", "0", "--dsn", NOWHERE), "not positive"),
        (("dlq", "list", "q", "--reason", "bored", "--dsn", NOWHERE), "attempts_exhausted"),
        (("dlq", "show", "q", "--dsn", NOWHERE), "no MSG_ID"),
        (("queues", "list", "--dsn", "embedded:"), "names no folder"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_usage(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """What was typed wrongly is said, before anything connects, and the exit code is 2."""
    done = typed(*arguments, cwd=tmp_path)
    assert said in done.err
    assert done.code == 2
    assert done.out == ""


def test_configuration(tmp_path: Path) -> None:
    """All problems of a file are listed with their remedies."""
    (tmp_path / "supervisor.toml").write_text('[queues.a]\nhandler = "t:h"\nconcurency = 1\nstandby = -1\n')
    done = typed(cwd=tmp_path, dsn=NOWHERE)
    assert done.code == 2
    assert "2 problems, nothing was started" in done.err
    assert 'did you mean "concurrency"?' in done.err


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    """Neither a refusal nor a failed connection shows the password of a DSN."""
    for dsn in ("mysql://user:hush@h/db", "postgresql://user:hush@127.0.0.1:9/db"):
        done = typed("queues", "list", cwd=tmp_path, dsn=dsn)
        assert "hush" not in done.out + done.err


@pytest.mark.parametrize("command", [("run",), ("init",), ("queues", "list"), ("send", "q", "1"), ("dlq", "list", "q")])
def test_database_unreachable(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A database that is not there fails the start with one message."""
    (tmp_path / "tasks.py").write_text("def handle(message): ...\n")
    queue = ("--queue", "a=tasks:handle") if command == ("run",) else ()
    done = typed(*command, *queue, cwd=tmp_path, dsn=NOWHERE)
    assert done.code == 1
    assert "cannot be reached" in done.err
    assert "SUPERVISOR_DSN" in done.err


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    """connect_timeout bounds the wait for a server that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/none"
        done = typed("queues", "list", cwd=tmp_path, dsn=dsn, env={"SUPERVISOR_DATABASE__CONNECT_TIMEOUT": "2s"})
    assert done.code == 1
    assert "cannot be reached" in done.err


@pytest.mark.parametrize("command", [("run", "--queue", "a=tasks:handle"), ("queues", "list"), ("send", "q", "1")])
def test_without_pgmq(tmp_path: Path, bare_database: str, command: tuple[str, ...]) -> None:
    """A database without PGMQ fails, and `init` is the remedy."""
    (tmp_path / "tasks.py").write_text("def handle(message): ...\n")
    done = typed(*command, cwd=tmp_path, dsn=bare_database)
    assert done.code == 1
    assert "PGMQ is not installed" in done.err
    assert "pgmq-supervisor init" in done.err


HANDLERS = """
value = 5
def handle(message): ...
def two(message, tx): ...
def none(): ...
def generator(message): yield
class Thing:
    def method(self, message): ...
thing = Thing()
"""


@pytest.mark.parametrize(
    ("handler", "mode", "said"),
    [
        ("nowhere:handle", "regular", "no module 'nowhere'"),
        ("tasks:nothing", "regular", "tasks has no 'nothing'"),
        ("tasks:value", "regular", "is not callable"),
        ("tasks:two", "regular", "1 positional argument"),
        ("tasks:none", "regular", "1 positional argument"),
        ("tasks:handle", "transactional", "2 positional argument"),
        ("tasks:generator", "regular", "has a yield"),
        ("tasks:Thing.method", "regular", "1 positional argument"),
    ],
)
def test_handlers_that_cannot_work(tmp_path: Path, database: str, handler: str, mode: str, said: str) -> None:
    """A handler that does not exist, is not callable or has the wrong arity is refused at start with the reason."""
    (tmp_path / "tasks.py").write_text(HANDLERS)
    done = typed("--queue", f"a={handler}", cwd=tmp_path, dsn=database, env={"SUPERVISOR_QUEUES__A__MODE": mode})
    assert done.code == 2
    assert said in done.err
    assert "nothing was started" in done.err


def test_memory_limit_below_the_imports(tmp_path: Path, database: str) -> None:
    """A limit that a child breaks by importing its handler is refused before anything is claimed."""
    (tmp_path / "tasks.py").write_text("ballast = b'x' * (64 << 20)\ndef handle(message): ...\n")
    limits = {"SUPERVISOR_QUEUES__A__MEMORY_LIMIT": "40MB"}
    done = typed("--queue", "a=tasks:handle", cwd=tmp_path, dsn=database, env=limits)
    assert done.code == 2
    assert "memory_limit (40MB) is below" in done.err


def test_more_connections_than_the_server_has(tmp_path: Path, database: str) -> None:
    """Transactional children that could never all get a session are refused."""
    (tmp_path / "tasks.py").write_text(HANDLERS)
    environ = {"SUPERVISOR_QUEUES__A__MODE": "transactional", "SUPERVISOR_QUEUES__A__CONCURRENCY": "900"}
    done = typed("--queue", "a=tasks:two", cwd=tmp_path, dsn=database, env=environ)
    assert done.code == 2
    assert "database connections, the server grants" in done.err


@pytest.mark.parametrize(
    "words", ["", "run", "demo", "check", "init", "send", "queues", "queues drop", "dlq", "dlq show", "top"]
)
def test_help_everywhere(tmp_path: Path, words: str) -> None:
    """--help explains every command and ends well."""
    done = typed(*words.split(), "--help", cwd=tmp_path)
    assert done.code == 0
    assert "Usage: pgmq-supervisor" in done.out

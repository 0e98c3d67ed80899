"""Where values come from, and who wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.config import Config, Overrides, examine, load

FILE = """
[database]
dsn = "postgresql://file/"

[queues.orders]
handler = "tasks:handle"
concurrency = 2
retry = { base = "3s" }
"""


def config(
    tmp_path: Path, environ: dict[str, str] | None = None, overrides: Overrides | None = None, text: str = FILE
) -> Config:
    """Load a file of this text in an empty folder."""
    (tmp_path / "supervisor.toml").write_text(text)
    return load(overrides or Overrides(), environ=environ or {}, cwd=tmp_path)


DSN_SOURCES = [
    ("--dsn", {"dsn": "postgresql://flag/"}),
    ("SUPERVISOR_DSN", {"SUPERVISOR_DSN": "postgresql://short/"}),
    ("SUPERVISOR_DATABASE__DSN", {"SUPERVISOR_DATABASE__DSN": "postgresql://long/"}),
    ("supervisor.toml", {}),
    ("DATABASE_URL", {"DATABASE_URL": "postgresql://fallback/"}),
]


@pytest.mark.parametrize("first", range(len(DSN_SOURCES)), ids=[name for name, _ in DSN_SOURCES])
def test_order_of_dsns(tmp_path: Path, first: int) -> None:
    """--dsn, SUPERVISOR_DSN, SUPERVISOR_DATABASE__DSN, the file, DATABASE_URL: the first that is there counts."""
    environ: dict[str, str] = {}
    for _, given in DSN_SOURCES[first:]:
        environ.update({key: value for key, value in given.items() if key != "dsn"})
    overrides = Overrides(dsn="postgresql://flag/" if first == 0 else None)
    found = config(tmp_path, environ, overrides, FILE if first <= 3 else "")
    assert found.dsn_origin == DSN_SOURCES[first][0]
    expected = ["flag", "short", "long", "file", "fallback"][first]
    assert found.dsn == f"postgresql://{expected}/"


def test_environment_wins_over_file(tmp_path: Path) -> None:
    """A variable replaces the file's value, texts become what the key is, and the rest of the file stays."""
    found = config(
        tmp_path,
        {
            "SUPERVISOR_QUEUES__ORDERS__CONCURRENCY": "7",
            "SUPERVISOR_QUEUES__ORDERS__NOTIFY": "false",
            "SUPERVISOR_QUEUES__ORDERS__RETRY__FACTOR": "1.5",
            "SUPERVISOR_QUEUES__ORDERS__MEMORY_LIMIT": "512MB",
            "SUPERVISOR_QUEUES__ORDERS__HARD_TIMEOUT": "none",
        },
    ).queues["orders"]
    assert (found.concurrency, found.notify, found.retry.factor, found.retry.base) == (7, False, 1.5, 3.0)
    assert (found.memory_limit, found.hard_timeout, found.handler) == (512 << 20, None, "tasks:handle")


def test_flags_win_over_environment(tmp_path: Path) -> None:
    """--queue sets a handler, --concurrency that of every queue, over file and environment."""
    found = config(
        tmp_path,
        {"SUPERVISOR_QUEUES__ORDERS__CONCURRENCY": "7", "SUPERVISOR_QUEUES__ORDERS__HANDLER": "env:handle"},
        Overrides(queues=("orders=flag:handle", "mails=mail.tasks:send"), concurrency=3),
    )
    assert {name: (queue.handler, queue.concurrency) for name, queue in found.queues.items()} == {
        "orders": ("flag:handle", 3),
        "mails": ("mail.tasks:send", 3),
    }


@pytest.mark.parametrize("variable", ["SUPERVISOR_LOG__LEVEL", "supervisor_log__level", "Supervisor_Log__Level"])
def test_names_without_regard_to_case(tmp_path: Path, variable: str) -> None:
    """Names of variables may be written in any case."""
    assert config(tmp_path, {variable: "debug"}).log.level == "debug"


def test_same_variable_in_two_cases(tmp_path: Path) -> None:
    """Two spellings of one name with different values are refused: neither can be right."""
    (tmp_path / "supervisor.toml").write_text(FILE)
    environ = {"SUPERVISOR_LOG__LEVEL": "debug", "supervisor_log__level": "info"}
    [problem] = examine(Overrides(), environ=environ, cwd=tmp_path).problems
    assert "differs in case only" in problem.reason


@pytest.mark.parametrize("name", ["a__b", "retry", "a__retry", "_a", "a_", "mode", "x__mode"])
def test_queue_names_with_underscores(tmp_path: Path, name: str) -> None:
    """A queue's name in a variable may itself have underscores, and words that are keys."""
    prefix = f"SUPERVISOR_QUEUES__{name.upper()}"
    environ = {f"{prefix}__HANDLER": "t:h", f"{prefix}__MAX_ATTEMPTS": "9", f"{prefix}__RETRY__MAX": "9m"}
    [(found, queue)] = config(tmp_path, environ, text='[database]\ndsn = "embedded"\n').queues.items()
    assert found == name
    assert (queue.max_attempts, queue.retry.max) == (9, 540.0)


def test_whole_retry_in_a_variable(tmp_path: Path) -> None:
    """RETRY may be given as the inline table that the file would have."""
    environ = {"SUPERVISOR_QUEUES__ORDERS__RETRY": '{ base = "2s", jitter = false }'}
    found = config(tmp_path, environ).queues["orders"].retry
    assert (found.base, found.jitter) == (2.0, False)


def test_foreign_variables_are_ignored(tmp_path: Path) -> None:
    """What supervisord sets, unknown sections and empty variables change nothing."""
    environ = {
        "SUPERVISOR_ENABLED": "1",
        "SUPERVISOR_PROCESS_NAME": "x",
        "SUPERVISOR_SERVER_URL": "unix:///run/supervisor.sock",
        "SUPERVISOR_GROUP_NAME": "x",
        "SUPERVISOR_OTHER__THING": "x",
        "SUPERVISOR_LOG__LEVEL": "",
        "SUPERVISOR_DSN": "",
        "DATABASE_URL": "",
    }
    assert config(tmp_path, environ) == config(tmp_path)


def test_unknown_key_in_a_variable(tmp_path: Path) -> None:
    """Within a section of ours an unknown key is refused, and the variable is named."""
    (tmp_path / "supervisor.toml").write_text(FILE)
    for variable, key in [
        ("SUPERVISOR_QUEUES__ORDERS__CONCURENCY", "queues.orders.concurency"),
        ("SUPERVISOR_QUEUES__ORDERS__RETRY__BASSE", "queues.orders.retry.basse"),
        ("SUPERVISOR_LOG__LEVELL", "log.levell"),
    ]:
        [problem] = examine(Overrides(), environ={variable: "1"}, cwd=tmp_path).problems
        assert (problem.where, problem.key) == (variable, key)
        assert "did you mean" in problem.remedy


def test_misspelt_section_in_a_variable_is_a_warning(tmp_path: Path) -> None:
    """A variable that looks like one of ours is ignored and pointed out."""
    (tmp_path / "supervisor.toml").write_text(FILE)
    examined = examine(Overrides(), environ={"SUPERVISOR_QUEUE__ORDERS__MODE": "x"}, cwd=tmp_path)
    assert not examined.problems
    [warning] = examined.warnings
    assert "SUPERVISOR_QUEUES__ORDERS__MODE" in warning.remedy


def test_http_is_off_without_a_section(tmp_path: Path) -> None:
    """HTTP is on where its section or a variable of it is there."""
    assert config(tmp_path).http is None
    on = config(tmp_path, text=FILE + "[http]\n").http
    assert on is not None
    assert (on.host, on.port, on.token) == ("127.0.0.1", 8321, None)
    by_environment = config(tmp_path, {"SUPERVISOR_HTTP__PORT": "0"}).http
    assert by_environment is not None
    assert by_environment.port == 0


def test_default_file_is_optional(tmp_path: Path) -> None:
    """Without a file, defaults, environment and flags count."""
    found = load(Overrides(dsn="embedded"), environ={}, cwd=tmp_path)
    assert found.source is None
    assert not found.queues


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    """A file saved by an editor of another system is read."""
    (tmp_path / "supervisor.toml").write_bytes(b"\xef\xbb\xbf" + FILE.replace("\n", "\r\n").encode())
    assert load(Overrides(), environ={}, cwd=tmp_path).queues["orders"].concurrency == 2


def test_secrets_are_not_in_the_repr(tmp_path: Path) -> None:
    """A configuration in a log line shows neither DSN nor token."""
    found = config(tmp_path, {"SUPERVISOR_DSN": "postgresql://u:hush@h/", "SUPERVISOR_HTTP__TOKEN": "hush"})
    assert "hush" not in repr(found)

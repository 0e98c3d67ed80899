"""The catalogue of bad input: every kind gets its message, its place and its remedy, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.config import InvalidConfiguration, Overrides, Problem, examine, load

QUEUE = '[queues.a]\nhandler = "tasks:handle"\n'


def problems(
    tmp_path: Path,
    text: str | bytes | None = None,
    *,
    environ: dict[str, str] | None = None,
    overrides: Overrides | None = None,
) -> list[Problem]:
    """Give what is wrong with a file of this text, beside a DSN that is fine."""
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "supervisor.toml").write_bytes(data)
    given = overrides or Overrides(dsn="embedded")
    examined = examine(given, environ=environ or {}, cwd=tmp_path)
    return list(examined.problems)


CATALOGUE = [
    # line after QUEUE, key that is blamed, value shown, part of the reason, part of the remedy
    ("concurency = 2", "queues.a.concurency", "2", "unknown key", '"concurrency"'),
    ("frobnicate = 2", "queues.a.frobnicate", "2", "unknown key", "known here: handler, mode"),
    ('concurrency = "4"', "queues.a.concurrency", '"4"', "is a string, no integer", "an integer from 1 to 1000"),
    ("concurrency = true", "queues.a.concurrency", "true", "is a boolean, no integer", "an integer"),
    ("concurrency = 1.5", "queues.a.concurrency", "1.5", "is a float, no integer", "an integer"),
    ("concurrency = 0", "queues.a.concurrency", "0", "is below 1", "from 1"),
    ("concurrency = -1", "queues.a.concurrency", "-1", "is negative", "from 1"),
    ("concurrency = 100000", "queues.a.concurrency", "100000", "is above 1000", "to 1000"),
    ("standby = -1", "queues.a.standby", "-1", "is negative", "from 0"),
    ('mode = "transaction"', "queues.a.mode", '"transaction"', "none of the possible", '"transactional"'),
    ("mode = 1", "queues.a.mode", "1", "none of the possible", '"regular"'),
    ('visibility_timeout = "500ms"', "queues.a.visibility_timeout", '"500ms"', "below 1 s", '"1s"'),
    ('visibility_timeout = "0s"', "queues.a.visibility_timeout", '"0s"', "is zero", "positive"),
    ('visibility_timeout = "-5s"', "queues.a.visibility_timeout", '"-5s"', "is negative", '"30s"'),
    ('visibility_timeout = "none"', "queues.a.visibility_timeout", '"none"', "cannot be read", '"30s"'),
    ('visibility_timeout = "5 parsecs"', "queues.a.visibility_timeout", '"5 parsecs"', "cannot be read", '"30s"'),
    ("visibility_timeout = nan", "queues.a.visibility_timeout", "nan", "is not finite", '"30s"'),
    ("visibility_timeout = 1e300", "queues.a.visibility_timeout", "1e+300", "is longer than", '"30s"'),
    ('soft_timeout = "1h"', "queues.a.soft_timeout", '"1h"', "not below hard_timeout (30m)", "below 30m"),
    ('hard_timeout = "0s"', "queues.a.hard_timeout", '"0s"', "is zero", '"none"'),
    ('hard_timeout = "never"', "queues.a.hard_timeout", '"never"', "cannot be read", '"30s"'),
    ('memory_limit = "1MB"', "queues.a.memory_limit", '"1MB"', "less than a Python interpreter", '"512MB"'),
    ("memory_limit = 512", "queues.a.memory_limit", "512", "less than a Python interpreter", '"512MB"'),
    ('memory_limit = "lots"', "queues.a.memory_limit", '"lots"', "cannot be read", '"512MB"'),
    ("memory_limit = -1", "queues.a.memory_limit", "-1", "is not positive", '"512MB"'),
    ("max_tasks_per_child = 0", "queues.a.max_tasks_per_child", "0", "is below 1", '"none"'),
    ('max_child_age = "0s"', "queues.a.max_child_age", '"0s"', "is zero", '"none"'),
    ("claim_batch_size = 0", "queues.a.claim_batch_size", "0", "is below 1", "from 1"),
    ("concurrency = 4\nmax_in_flight = 3", "queues.a.max_in_flight", "3", "below concurrency (4)", "at least 4"),
    ('max_in_flight = "all"', "queues.a.max_in_flight", '"all"', "is a string, no integer", '"auto"'),
    ("polling_interval = 0", "queues.a.polling_interval", "0", "is zero", "positive"),
    ('notify = "yes"', "queues.a.notify", '"yes"', "is a string, no boolean", "true or false"),
    ('on_success = "ignore"', "queues.a.on_success", '"ignore"', "none of the possible", '"archive"'),
    ("max_attempts = 0", "queues.a.max_attempts", "0", "is below 1", "from 1"),
    ("max_deaths = 0", "queues.a.max_deaths", "0", "is below 1", "from 1"),
    ("retry = 5", "queues.a.retry", "5", "is no table", 'base = "1s"'),
    ('retry = { bass = "1s" }', "queues.a.retry.bass", '"1s"', "unknown key", '"base"'),
    ('retry = { base = "0s" }', "queues.a.retry.base", '"0s"', "is zero", "positive"),
    ("retry = { factor = 0.5 }", "queues.a.retry.factor", "0.5", "is not between 1 and 1000", "from 1"),
    ("retry = { factor = nan }", "queues.a.retry.factor", "nan", "is not between", "from 1"),
    ('retry = { base = "1h" }', "queues.a.retry.max", None, "below retry.base (1h)", "at least 1h"),
    ('dead_letter_queue = "a"', "queues.a.dead_letter_queue", '"a"', "is the queue itself", '"a_dlq"'),
    ('dead_letter_queue = "Dead"', "queues.a.dead_letter_queue", '"Dead"', "upper-case", "lower case"),
    ('dead_letter_queue = ""', "queues.a.dead_letter_queue", '""', "is empty", "leave the key out"),
    ('storage = "ram"', "queues.a.storage", '"ram"', "none of the possible", '"unlogged"'),
    ('output = "none"', "queues.a.output", '"none"', "none of the possible", '"capture"'),
    ("[queue.b]", "queue", "{ ... }", "unknown section", '"queues"'),
    ("[database]\npool_size = 0", "database.pool_size", "0", "is below 1", '"auto"'),
    ("[database]\nconnect_timeout = 0", "database.connect_timeout", "0", "is zero", "positive"),
    ('[database]\nlisten_dsn = "embedded"', "database.listen_dsn", '"embedded"', "cannot be an embedded", "leave it"),
    ('[shutdown]\ngrace = "-1s"', "shutdown.grace", '"-1s"', "is negative", '"30s"'),
    ("[http]\nport = 65536", "http.port", "65536", "is above 65535", "to 65535"),
    ("[http]\nport = -1", "http.port", "-1", "is negative", "from 0"),
    ('[http]\ntoken = ""', "http.token", '"***"', "is empty", "leave the key out"),
    ("[http]\nhost = 5", "http.host", "5", "is an integer, no string", "quotes"),
    ('[log]\nlevel = "loud"', "log.level", '"loud"', "none of the possible", '"info"'),
    (f'[control]\nsocket = "/{"x" * 200}"', "control.socket", None, "longer than 107 bytes", "shorter"),
]


@pytest.mark.parametrize(("text", "key", "value", "reason", "remedy"), CATALOGUE, ids=[row[0] for row in CATALOGUE])
def test_bad_value(tmp_path: Path, text: str, key: str, value: str | None, reason: str, remedy: str) -> None:
    """A bad value is refused with its file, key, value, reason and remedy, and nothing else is complained of."""
    [problem] = problems(tmp_path, QUEUE + text)
    assert problem.where == "supervisor.toml"
    assert problem.key == key
    assert value is None or problem.value == value
    assert reason in problem.reason
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("handler", "reason", "remedy"),
    [
        ("tasks", "no colon", '"tasks:handle"'),
        ("tasks.handle", "no colon", '"tasks:handle"'),
        ("tasks.py", "no colon", '"tasks:handle"'),
        ("src/tasks.py:handle", "names a file", '"src.tasks:handle"'),
        ("tasks:", "no path of a function", "Python names"),
        (":handle", "no path of a function", "Python names"),
        ("tasks:han dle", "no path of a function", "Python names"),
        (".tasks:handle", "no path of a function", "Python names"),
        ("", "is empty", "give it a value"),
    ],
)
def test_handler_syntax(tmp_path: Path, handler: str, reason: str, remedy: str) -> None:
    """A handler that cannot name a function is refused, with a guess where there is one."""
    [problem] = problems(tmp_path, f'[queues.a]\nhandler = "{handler}"\n')
    assert problem.key == "queues.a.handler"
    assert reason.replace("no path", "not a path") in problem.reason or reason in problem.reason
    assert remedy in problem.remedy


@pytest.mark.parametrize("name", ["Orders", "or-ders", "or ders", 'or"ders', "örders", "x" * 48, ""])
def test_queue_names(tmp_path: Path, name: str) -> None:
    """Names that PGMQ or quoting would change are refused with the reason."""
    [problem] = problems(tmp_path, f"[queues.'{name}']\nhandler = \"tasks:handle\"\n")
    assert problem.key.startswith("queues.")
    assert "queue name" in problem.reason


def test_handler_is_required(tmp_path: Path) -> None:
    """A queue without a handler is refused."""
    [problem] = problems(tmp_path, "[queues.a]\nconcurrency = 2\n")
    assert (problem.key, problem.value, problem.reason) == ("queues.a.handler", None, "is missing")


def test_everything_at_once(tmp_path: Path) -> None:
    """Independent problems of all kinds are reported together, those between keys included."""
    text = """
    [database]
    pool_siz = 3
    [queues.a]
    handler = "tasks"
    visibility_timeout = "100ms"
    soft_timeout = "2h"
    [queues.B]
    handler = "tasks:handle"
    """
    found = {problem.key for problem in problems(tmp_path, text, environ={"SUPERVISOR_LOG__LEVEL": "loud"})}
    assert found == {
        "database.pool_siz",
        "queues.a.handler",
        "queues.a.visibility_timeout",
        "queues.a.soft_timeout",
        "queues.B",
        "log.level",
    }


def test_rules_stay_silent_about_refused_keys(tmp_path: Path) -> None:
    """A key that was refused is not judged against another one."""
    [problem] = problems(tmp_path, QUEUE + 'soft_timeout = "2h"\nhard_timeout = "x"\n')
    assert problem.key == "queues.a.hard_timeout"


def test_ring_of_dead_letter_queues(tmp_path: Path) -> None:
    """Queues that are each other's dead-letter queue are refused once, with the way round."""
    text = '[queues.a]\nhandler="t:h"\ndead_letter_queue="b"\n[queues.b]\nhandler="t:h"\ndead_letter_queue="a"\n'
    [problem] = problems(tmp_path, text)
    assert "a -> b -> a" in problem.reason


@pytest.mark.parametrize(
    "text", ["queues = 5", "[[queues]]\na = 1", "[queues]\na = 1", "database = 'x'", "http = true"]
)
def test_tables_of_the_wrong_type(tmp_path: Path, text: str) -> None:
    """A section that is no table is refused as such."""
    [problem] = problems(tmp_path, text)
    assert problem.reason == "is no table"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[database\n", "supervisor.toml, line 1, column "),
        ("[database]\ndsn = embedded\n", "supervisor.toml, line 2, column 7"),
        ('[database]\r\ndsn = "x', "supervisor.toml, line 2, column 9"),
        ("a = 1\na = 2\n", "supervisor.toml, line 2, column "),
        (b'[database]\ndsn = "\xff"\n', "supervisor.toml, line 2, column 8"),
    ],
)
def test_broken_toml(tmp_path: Path, text: str | bytes, place: str) -> None:
    """What is not TOML is reported with file, line and column."""
    [problem] = problems(tmp_path, text)
    assert problem.where.startswith(place)
    assert problem.reason.startswith("is not ")


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    """A file that exhausts the parser is refused like any other."""
    assert problems(tmp_path, "a = " + "[" * 100_000)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    """A file that is named and cannot be read is a problem of its own."""
    [problem] = problems(tmp_path, overrides=Overrides(config=name, dsn="embedded"))
    assert problem.where == name
    assert "cannot be read" in problem.reason


@pytest.mark.parametrize("argument", ["a", "a=", "=t:h", ""])
def test_malformed_queue_flag(tmp_path: Path, argument: str) -> None:
    """--queue that is not NAME=MODULE:FUNCTION is refused."""
    [problem] = problems(tmp_path, overrides=Overrides(dsn="embedded", queues=(argument,)))
    assert problem.where == "--queue"
    assert "NAME=MODULE:FUNCTION" in problem.reason


def test_app_dir_must_be_a_folder(tmp_path: Path) -> None:
    """--app-dir that is not there, or a file, is refused."""
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        [problem] = problems(tmp_path, overrides=Overrides(dsn="embedded", app_dir=name))
        assert problem.where == "--app-dir"


@pytest.mark.parametrize(
    ("dsn", "reason"),
    [
        ("mysql://user:secret@host/db", 'scheme "mysql"'),
        ("postgresql+psycopg://user:secret@host/db", "SQLAlchemy"),
        ("just words", "cannot be read"),
        ("postgresql://host/db?colour=red", "cannot be read"),
        ("host=h colour=red", "cannot be read"),
        ("", "is empty"),
        ("embedded:", "names no folder"),
    ],
)
def test_bad_dsn(tmp_path: Path, dsn: str, reason: str) -> None:
    """A DSN that libpq could not read is refused before anything connects, and never shows its password."""
    [problem] = problems(tmp_path, overrides=Overrides(dsn=dsn))
    assert problem.where == "--dsn"
    assert reason in problem.reason
    assert "secret" not in str(problem)


def test_passwords_are_hidden(tmp_path: Path) -> None:
    """Passwords in either notation, and tokens, do not appear in messages."""
    text = (
        "[database]\ndsn = 'mysql://u:hush@h/d'\nlisten_dsn = \"mysql://h/?x password='hu sh' \"\n[http]\ntoken = 5\n"
    )
    shown = "\n".join(map(str, problems(tmp_path, text, overrides=Overrides())))
    assert "hush" not in shown
    assert "hu sh" not in shown
    assert "= 5" not in shown


def test_load_raises_with_all_problems(tmp_path: Path) -> None:
    """`load` raises one error whose text has every problem, and says that nothing was started."""
    (tmp_path / "supervisor.toml").write_text(QUEUE + "concurrency = 0\nstandby = -1\n")
    with pytest.raises(InvalidConfiguration) as caught:
        load(Overrides(dsn="embedded"), environ={}, cwd=tmp_path)
    assert len(caught.value.problems) == 2
    assert "2 problems, nothing was started" in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_no_database_and_no_queue(tmp_path: Path) -> None:
    """What a command needs and nobody named is a problem that says every way to name it."""
    examined = examine(Overrides(), environ={}, cwd=tmp_path, needs_queues=True)
    assert [problem.key for problem in examined.problems] == ["database.dsn", "queues"]
    assert "--dsn" in examined.problems[0].remedy
    assert "--queue" in examined.problems[1].remedy

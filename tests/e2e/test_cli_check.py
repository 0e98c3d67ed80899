"""check: each finding ok, warn or fail, with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from tests.support.cli import Done, typed

CONFIG = '[queues.q]\nhandler = "tasks:handle"\n'


def findings(done: Done) -> dict[str, Any]:
    """The last finding of each subject."""
    return {finding["subject"]: finding for finding in done.json["findings"]}


def application(folder: Path, tasks: str = "def handle(message): ...\n", config: str = CONFIG) -> None:
    """Write a configuration and its module."""
    (folder / "supervisor.toml").write_text(config)
    (folder / "tasks.py").write_text(tasks)


def test_all_is_well(tmp_path: Path, database: str) -> None:
    """After init everything is ok, and the exit code is 0."""
    application(tmp_path)
    typed("init", cwd=tmp_path, dsn=database)
    done = typed("check", "--json", cwd=tmp_path, dsn=database)
    assert [finding for finding in done.json["findings"] if finding["level"] != "ok"] == []
    assert (done.code, done.json["ok"]) == (0, True)
    found = findings(done)
    assert {
        "configuration",
        "server",
        "pgmq",
        "queue q",
        "notify",
        "notify q",
        "connections",
        "clock",
        "memory",
    } <= set(found)
    text = typed("check", cwd=tmp_path, dsn=database)
    assert text.out.endswith("0 warn, 0 fail\n")


def test_configuration_fails(tmp_path: Path) -> None:
    """A broken configuration is a failed check, not a usage error, and every problem has its remedy."""
    application(tmp_path, config=CONFIG + "concurency = 2\nstandby = -1\n")
    done = typed("check", "--json", cwd=tmp_path, dsn="postgresql://127.0.0.1:9/")
    assert done.code == 1
    failed = [finding for finding in done.json["findings"] if finding["level"] == "fail"]
    assert len(failed) == 2
    assert all(finding["remedy"] for finding in failed)


def test_database_away(tmp_path: Path) -> None:
    """Without a database the handlers are still looked at."""
    application(tmp_path)
    done = typed("check", "--json", cwd=tmp_path, dsn="postgresql://127.0.0.1:9/none")
    assert done.code == 1
    found = findings(done)
    assert found["handler tasks:handle"]["level"] == "ok"
    assert found["database"]["level"] == "fail"


def test_without_pgmq(tmp_path: Path, bare_database: str) -> None:
    """PGMQ that is not there is a failure whose remedy is init."""
    application(tmp_path)
    done = typed("check", "--json", cwd=tmp_path, dsn=bare_database)
    assert done.code == 1
    assert "init" in findings(done)["pgmq"]["remedy"]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("raise RuntimeError('no licence')\n", "no licence"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("import os\nos._exit(7)\n", "exit code 7"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "SIGSEGV"),
        ("import missing_library\n", "missing_library"),
        ("def handle(): ...\n", "1 positional argument"),
        ("print('x' * 100_000_000)\nhandle = None\n", "not callable"),
    ],
)
def test_handlers_are_imported_elsewhere(tmp_path: Path, database: str, tasks: str, said: str) -> None:
    """Whatever an import does, it happens in a throw-away process, and is told."""
    application(tmp_path, tasks)
    done = typed("check", "--json", cwd=tmp_path, dsn=database)
    assert done.code == 1
    finding = findings(done)["handler tasks:handle"]
    assert finding["level"] == "fail"
    assert said in finding["text"]


def test_broken_notifications(tmp_path: Path, database: str) -> None:
    """A trigger without its throttle row, which is silent for good, is pointed out."""
    application(tmp_path)
    typed("init", cwd=tmp_path, dsn=database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("delete from pgmq.notify_insert_throttle")
    finding = findings(typed("check", "--json", cwd=tmp_path, dsn=database))["notify q"]
    assert finding["level"] == "warn"
    assert "throttle" in finding["text"]


def test_privileges(tmp_path: Path, database: str) -> None:
    """What a role may not do on a queue fails with the grant as remedy."""
    application(tmp_path)
    typed("init", cwd=tmp_path, dsn=database)
    role = f"clerk_{conninfo.conninfo_to_dict(database)['dbname']}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"create role {role} login".encode())
        connection.execute(f"grant usage on schema pgmq to {role}; grant select on pgmq.q_q to {role}".encode())
        try:
            done = typed("check", "--json", cwd=tmp_path, dsn=conninfo.make_conninfo(database, user=role))
        finally:
            connection.execute(f"drop owned by {role}; drop role {role}".encode())
    assert done.code == 1
    texts = [finding for finding in done.json["findings"] if finding["subject"] == "queue q"]
    assert any("no right to insert, update, delete in pgmq.q_q" in finding["text"] for finding in texts)
    assert any(finding["remedy"].startswith("grant ") for finding in texts)


def test_create_false_and_missing(tmp_path: Path, database: str) -> None:
    """Queues that are missing are fine where they will be created, and a failure where not."""
    application(tmp_path)
    assert findings(typed("check", "--json", cwd=tmp_path, dsn=database))["queue q"]["level"] == "ok"
    application(tmp_path, config=CONFIG + "create = false\n")
    assert findings(typed("check", "--json", cwd=tmp_path, dsn=database))["queue q"]["level"] == "fail"


def test_supervisord_beside_us(tmp_path: Path, database: str) -> None:
    """The PyPI project supervisor in the same environment is pointed out: both have a package of that name."""
    application(tmp_path)
    info = tmp_path / "elsewhere" / "supervisor-4.2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: supervisor\nVersion: 4.2.5\n")
    done = typed("check", "--json", cwd=tmp_path, dsn=database, env={"PYTHONPATH": str(info.parent)})
    assert done.code == 1
    assert "4.2.5 (supervisord)" in findings(done)["installation"]["text"]

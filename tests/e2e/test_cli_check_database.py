"""check on databases that are not as they should be: each finding names what is missing, and its remedy is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from tests.support.cli import Done, typed
from tests.support.pooler import transaction_pooler
from tests.support.replication import replicated_servers
from tests.support.roles import grant_what_check_asks, ordinary_role
from tests.support.running import stage

CONFIG = """
[queues.jobs]
handler = "tasks:handle"
on_success = "archive"
"""
TASKS = """
    def handle(message):
        if message.body == "bad":
            raise message.dead_letter("no good")
"""


def found(done: Done, subject: str) -> list[dict[str, Any]]:
    """The findings of a subject."""
    return [finding for finding in done.json["findings"] if finding["subject"] == subject]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with a configuration and its module."""
    (tmp_path / "supervisor.toml").write_text(CONFIG)
    (tmp_path / "tasks.py").write_text("def handle(message): ...\n")
    return tmp_path


@pytest.fixture
def clerk(database: str) -> Iterator[str]:
    """Give the DSN of a role that may do nothing, in a database that `init` has made ready."""
    with ordinary_role(database, "clerk") as dsn:
        yield dsn


@pytest.mark.timeout(240)
def test_the_remedies_for_missing_rights_are_enough_to_run(folder: Path, database: str, clerk: str) -> None:
    """From a role without any right: what check says is granted, step by step, and then the supervisor works."""
    typed("init", cwd=folder, dsn=database)
    done, granted = grant_what_check_asks(folder, database, clerk)
    assert done.code == 0
    assert [one for one in done.json["findings"] if one["level"] != "ok"] == []
    assert any("on schema pgmq to" in grant for grant in granted)
    with stage(folder, database, CONFIG, TASKS) as on:
        on.service.dsn = clerk
        on.send("good", "bad")
        on.service.start()
        on.until_empty(timeout_s=30)
        paused = typed("pause", "jobs", cwd=folder, dsn=clerk)
        assert paused.code == 0
        assert on.rows("select count(*) from pgmq_supervisor.paused") == [(1,)]
        assert typed("resume", "jobs", cwd=folder, dsn=clerk).code == 0
        assert typed("dlq", "redrive", "jobs", "--all", cwd=folder, dsn=clerk).code == 0
        assert on.service.stop() == 0
        assert [body for body, _ in on.archived()] == ["good"]


def test_a_start_without_rights_says_which(folder: Path, database: str, clerk: str) -> None:
    """Exit 1 and a grant, no trace of the program's insides."""
    done = typed("run", cwd=folder, dsn=clerk)
    assert done.code == 1
    assert "grant usage on schema pgmq to clerk" in done.err


def test_a_pooler_is_seen_and_so_is_the_way_around_it(folder: Path, database: str) -> None:
    """A warning with listen_dsn as its remedy; with it all is well, and nothing rests on prepared statements."""
    typed("init", cwd=folder, dsn=database)
    with transaction_pooler(database) as pooled:
        for _ in range(2):
            done = typed("check", "--json", cwd=folder, dsn=pooled)
            assert done.code == 0
            [pooler], [notify] = found(done, "pooler"), found(done, "notify")
            assert (pooler["level"], notify["level"]) == ("warn", "warn")
            assert "listen_dsn" in pooler["remedy"]
        beside = {"SUPERVISOR_DATABASE__LISTEN_DSN": database}
        done = typed("check", "--json", cwd=folder, dsn=pooled, env=beside)
        assert [one for one in done.json["findings"] if one["level"] != "ok"] == []
        again = {"SUPERVISOR_DATABASE__LISTEN_DSN": pooled}
        [notify] = found(typed("check", "--json", cwd=folder, dsn=pooled, env=again), "notify")
        assert notify["level"] == "warn"
        assert "past every pooler" in notify["remedy"]


@pytest.mark.timeout(180)
def test_a_standby_is_seen(folder: Path) -> None:
    """A warning, as it may be promoted; what stands in it is looked at all the same."""
    with replicated_servers() as pair:
        typed("init", cwd=folder, dsn=pair.primary.dsn())
        pair.until_caught_up()
        done = typed("check", "--json", cwd=folder, dsn=pair.standby.dsn())
        assert done.code == 0
        [standby] = found(done, "standby")
        assert standby["level"] == "warn"
        assert "target_session_attrs" in standby["remedy"]
        assert [one["level"] for one in found(done, "queue jobs")] == ["ok"]
        assert found(typed("check", "--json", cwd=folder, dsn=pair.dsn), "primary")[0]["level"] == "ok"


def test_a_database_that_nobody_may_write_to_is_seen(folder: Path, database: str) -> None:
    """A setting of server, database, role or DSN makes transactions read-only: nothing could be claimed."""
    typed("init", cwd=folder, dsn=database)
    read_only = conninfo.make_conninfo(database, options="-c default_transaction_read_only=on")
    done = typed("check", "--json", cwd=folder, dsn=read_only)
    assert done.code == 1
    [finding] = found(done, "read only")
    assert "default_transaction_read_only" in finding["remedy"]


def test_a_trigger_that_only_its_owner_can_make_is_no_promise_of_ours(folder: Path, database: str, clerk: str) -> None:
    """The remedy names the owner, since `run` could not repair it."""
    typed("init", cwd=folder, dsn=database)
    with psycopg.connect(database, autocommit=True) as connection:
        role = conninfo.conninfo_to_dict(clerk)["user"]
        connection.execute(f"grant usage on schema pgmq to {role}".encode())
        connection.execute("drop trigger trigger_notify_queue_insert_listeners on pgmq.q_jobs")
    [finding] = found(typed("check", "--json", cwd=folder, dsn=clerk), "notify jobs")
    assert finding["level"] == "warn"
    assert "postgres" in finding["remedy"]

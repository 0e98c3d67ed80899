"""`python -m crashtests run` on handlers that are good, repeat, lose, and do things by halves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from crashtests.users.trials import choose_lines

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]

TASKS = """
import os
import threading

FOLDER = os.environ["YOURS"]


def effects(name):
    try:
        with open(os.path.join(FOLDER, name)) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def do(name, message):
    with open(os.path.join(FOLDER, name), "a") as file:
        file.write(message.body["operation_id"] + "\\n")


def charge(message):
    do("charge", message)


def careful(message):
    for name in ("charge", "mail"):
        if message.body["operation_id"] not in effects(name):
            do(name, message)


def by_halves(message):
    if message.body["operation_id"] in effects("charge"):
        return
    do("charge", message)
    do("mail", message)


def too_early(message):
    threading.Timer(0.2, do, ["charge", message]).start()


def book(message, tx):
    tx.execute("insert into payments (op) values (%s)", [message.body["operation_id"]])
    do("mail", message)
"""

PROBES = """
import psycopg
from mypkg.tasks import effects


def prepare(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table payments (op text not null)")


def count_charges(operation_id):
    return effects("charge").count(operation_id)


def count_both(operation_id):
    return {name: effects(name).count(operation_id) for name in ("charge", "mail")}


def count_all():
    return len(effects("charge"))


def count_payments(operation_id, *, connection):
    found = connection.execute("select count(*) from payments where op = %s", [operation_id]).fetchone()[0]
    return {"payment": found, "mail": effects("mail").count(operation_id)}


def fails():
    raise ValueError("as the test asks")
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A package of somebody else, with modules that are called like ours beside it."""
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").touch()
    (tmp_path / "mypkg" / "tasks.py").write_text(textwrap.dedent(TASKS))
    (tmp_path / "mypkg" / "probes.py").write_text(textwrap.dedent(PROBES))
    for ours in ("shared", "supervisor"):
        (tmp_path / ours).mkdir()
        (tmp_path / ours / "__init__.py").write_text("raise ImportError('the harness must not import this')\n")
    return tmp_path


def run(application: Path, handler: str, probe: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON report, and what it said."""
    command = [sys.executable, "-m", "crashtests", "run", f"mypkg.tasks:{handler}", "--probe", f"mypkg.probes:{probe}"]
    done = subprocess.run(
        [*command, "--app-dir", str(application), "--json", *options],
        cwd=application,
        env={**os.environ, "YOURS": str(application), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def results(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    """By victim and line."""
    return {(point["victim"], point["line"] or ""): point["result"] for point in report["points"]}


def test_an_outside_effect_before_its_ack_is_repeated(application: Path) -> None:
    """Reported and advised on; a violation because the user says so."""
    code, report, said = run(application, "charge", "count_charges", "--only", "effect done", "--strict")
    assert code == 1, said
    assert results(report) == {("child", ""): "repeated", ("parent", ""): "repeated", ("both", ""): "repeated"}
    assert {point["effects"]["effects"] for point in report["points"]} == {2}
    assert report["expected"] == {"effects": 1}
    assert any("operation id" in line for line in report["advice"])


def test_a_handler_that_looks_first_repeats_nothing(application: Path) -> None:
    """Killed before each of its lines; one line of `do` runs between the look and the effect."""
    code, report, said = run(application, "careful", "count_both", "--only", "during", "--lines", "4")
    assert code == 0, said
    lines = [point["line"] for point in report["points"] if point["victim"] == "child"]
    assert len(lines) == 4
    assert all(line.startswith("mypkg/tasks.py:") for line in lines)
    assert {point["victim"] for point in report["points"]} == {"child", "parent", "both"}
    assert "lost" not in report["summary"]
    assert "half-done" not in report["summary"]


def test_half_done_work_is_a_violation(application: Path) -> None:
    """The second run believes that all was done, because the first half of it was."""
    code, report, said = run(application, "by_halves", "count_both", "--only", "during", "--lines", "12")
    assert code == 1, said
    wrong = [point for point in report["points"] if point["result"] == "half-done"]
    assert wrong
    assert {tuple(point["effects"].items()) for point in wrong} == {(("charge", 1), ("mail", 0))}
    assert any(line.startswith("half-done") for line in report["advice"])


def test_work_after_the_return_is_lost(application: Path) -> None:
    """Acknowledged, and killed before the thread got to it. The probe counts everything: trials go one by one."""
    code, report, said = run(application, "too_early", "count_all", "--only", "after ack")
    assert code == 1, said
    assert results(report)["both", ""] == "lost"
    assert any(line.startswith("lost") for line in report["advice"])


def test_what_the_transaction_holds_is_never_repeated(application: Path) -> None:
    """Found out by looking while the commit is still to come; what is outside may be repeated."""
    options = ("--mode", "transactional", "--setup", "mypkg.probes:prepare", "--only", "before commit")
    code, report, said = run(application, "book", "count_payments", *options)
    assert code == 0, said
    assert report["inside_the_transaction"] == ["payment"]
    assert {(point["effects"]["payment"], point["effects"]["mail"]) for point in report["points"]} == {(1, 2)}
    assert {point["effects_at_the_kill"]["payment"] for point in report["points"]} == {0}


@pytest.mark.parametrize(
    ("handler", "probe", "reason"),
    [
        ("nobody", "count_charges", "has no 'nobody'"),
        ("charge", "nobody", "has no attribute 'nobody'"),
        ("charge", "fails", "as the test asks"),
        ("book", "count_charges", "takes (message, tx)"),
    ],
)
def test_what_cannot_be_tried_is_refused(application: Path, handler: str, probe: str, reason: str) -> None:
    """Exit code 2, with the reason."""
    code, report, said = run(application, handler, probe)
    assert (code, report) == (2, {})
    assert reason in " ".join(said.split())


def test_lines_are_spread_over_the_run() -> None:
    """First and last run of each line, as many as are wanted, always with the first and the last of all."""
    run_of = ["a:1", "a:2", "a:3", "a:2", "a:3", "a:2", "a:4"]
    assert choose_lines(run_of, 10) == [(1, "a:1"), (2, "a:2"), (3, "a:3"), (5, "a:3"), (6, "a:2"), (7, "a:4")]
    assert choose_lines(run_of, 2) == [(1, "a:1"), (7, "a:4")]
    assert choose_lines(run_of, 1) == [(1, "a:1")]
    assert choose_lines([], 3) == []

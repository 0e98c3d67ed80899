"""Boot: whose modules are imported, why a handler cannot be used, what a child is before its first message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.wire.frames import PROTOCOL, Kind
from tests.support.childharness import CHILD_MAIN, DEADLINE_S, HANDLERS, ROOT, ChildHarness
from tests.support.waiting import eventually

BAD_HANDLERS = [
    ("no_handler", "missing"),
    ("no_handler:", "missing"),
    (":one", "missing"),
    (".no_handler:one", "missing"),
    ("no_such_module:handle", "missing"),
    ("broken.no_such_module:handle", "missing"),
    ("no_handler:absent", "missing"),
    ("no_handler:Space.absent", "missing"),
    ("no_handler:number", "signature"),
    ("no_handler:no_arguments", "signature"),
    ("no_handler:two", "signature"),
    ("no_handler:generator", "signature"),
    ("no_handler:keyword_only", "signature"),
    ("broken.exits:handle", "import"),
    ("broken.interrupts:handle", "import"),
    ("broken.lacks_library:handle", "import"),
]


def boot_failure(handler: str, **options: Any) -> dict[str, Any]:
    """Start a child that cannot start; what it says, after its end with code 78."""
    with ChildHarness(handler, wait_ready=False, **options) as child:
        meta = child.expect(Kind.BOOT_FAILED).meta
        assert child.wait() == 78
        return meta


@pytest.mark.parametrize(("handler", "kind"), BAD_HANDLERS)
def test_a_handler_that_cannot_be_used_is_told_with_its_reason(handler: str, kind: str) -> None:
    """BOOT_FAILED with a kind, and exit code 78."""
    meta = boot_failure(handler)
    assert meta["kind"] == kind
    assert meta["error"]
    assert (kind == "import") == bool(meta["traceback"])


def test_a_child_of_another_version_says_so_and_what_to_do() -> None:
    """The package was changed under a running supervisor: nothing is guessed, whatever else its HELLO says."""
    meta = boot_failure("plain:show", hello={"protocol": PROTOCOL + 1, "slot": None})
    assert meta["kind"] == "version"
    assert "restart the supervisor" in meta["error"]


def test_a_missing_library_is_an_import_failure_that_names_it() -> None:
    """The handler's own module is there; what it needs is not."""
    assert "a_library_that_is_not_there" in boot_failure("broken.lacks_library:handle")["error"]


@pytest.mark.parametrize(
    ("handler", "mode", "ok"),
    [
        ("no_handler:one", "regular", True),
        ("no_handler:Space.inner", "regular", True),
        ("no_handler:partial", "regular", True),
        ("no_handler:optional", "regular", True),
        ("no_handler:from_c", "regular", True),
        ("plain:instance", "regular", True),
        ("plain:async_succeed", "regular", True),
        ("no_handler:two", "transactional", True),
        ("no_handler:optional", "transactional", True),
        ("no_handler:one", "transactional", False),
        ("broken.exits:handle", "regular", False),
        ("no_handler:one", "no such mode", False),
    ],
)
def test_check_imports_a_handler_in_a_process_of_its_own(handler: str, mode: str, ok: bool) -> None:
    """One JSON line on the descriptor that was given, whatever the import prints."""
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-u", "-P", str(CHILD_MAIN), "--check", handler, mode, str(HANDLERS), str(writing)]
        done = subprocess.run(command, pass_fds=[writing], timeout=DEADLINE_S, check=False, capture_output=True)
        os.close(writing)
        writing = -1
        answer = json.loads(os.read(reading, 1 << 20))
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    assert answer["ok"] is ok
    assert answer["rss_kb"] > 1000
    assert done.returncode == (0 if ok else 1)
    if not ok:
        assert answer["kind"] in {"import", "signature"}


# --- whose `shared` ---------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Write a module, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


HANDLER = """
import shared, child
from shared import ours
from child.deep import value

def handle(message):
    import shared.late
    try:
        message.raise_if_stopped()
        {}["missing"]
    except KeyError:
        message.log.info("late logging works")
    return message.dead_letter(f"{ours} {value} {shared.late.name}")
"""


@pytest.mark.parametrize("regular_package", [True, False])
def test_the_applications_own_shared_and_child_are_imported(tmp_path: Path, regular_package: bool) -> None:
    """Packages with our names, with or without __init__.py, go before ours; we go on working."""
    write(tmp_path / "app.py", HANDLER)
    if regular_package:
        write(tmp_path / "shared" / "__init__.py", "")
        write(tmp_path / "child" / "__init__.py", "")
    write(tmp_path / "shared" / "ours.py", "")
    write(tmp_path / "shared" / "late.py", "name = __name__")
    write(tmp_path / "child" / "deep.py", "value = 7")
    with ChildHarness("app:handle", app_dir=tmp_path) as child:
        reason = child.run()["reason"]
        assert str(tmp_path) in reason
        assert reason.endswith("7 shared.late")
        assert child.asides[0].meta["text"] == "late logging works"


def test_without_such_packages_our_root_is_not_on_the_path(tmp_path: Path) -> None:
    """What was not there before we came is not there for the handler."""
    write(tmp_path / "app.py", "import sys\ndef handle(message):\n    return message.dead_letter(repr(sys.path))\n")
    with ChildHarness("app:handle", app_dir=tmp_path, env={"PYTHONPATH": ""}) as child:
        path = json.loads(child.run()["reason"].replace("'", '"'))
        assert path[0] == str(tmp_path)
        assert path.count(str(tmp_path)) == 1
        assert path.count(str(ROOT)) <= 1  # an editable installation puts it there by itself


def test_a_conflicting_package_on_pythonpath_does_not_break_us(tmp_path: Path) -> None:
    """Our modules come from our root, whatever PYTHONPATH says."""
    for name in ("shared", "child", "supervisor"):
        write(tmp_path / "path" / name / "__init__.py", "raise RuntimeError('not ours')")
    write(tmp_path / "app" / "app.py", "def handle(message):\n    pass\n")
    with ChildHarness("app:handle", app_dir=tmp_path / "app", env={"PYTHONPATH": str(tmp_path / "path")}) as child:
        assert child.run()["kind"] == "success"


def test_modules_of_a_handler_are_not_hidden_by_ours(tmp_path: Path) -> None:
    """An application has a `message` and a `loader` of its own."""
    write(tmp_path / "message.py", "name = 'mine'")
    write(tmp_path / "app.py", "import message as m\ndef handle(message):\n    return message.dead_letter(m.name)\n")
    with ChildHarness("app:handle", app_dir=tmp_path) as child:
        assert child.run()["reason"] == "mine"


def test_processes_of_multiprocessing_do_not_become_children(tmp_path: Path) -> None:
    """Spawning imports the main file again, which then does nothing."""
    code = """
import multiprocessing, os

def work(queue):
    queue.put(os.getpid())

def handle(message):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    pid = queue.get(timeout=15)
    process.join(15)
    return message.dead_letter(f"{pid == process.pid} {process.exitcode}")
"""
    write(tmp_path / "app.py", code)
    with ChildHarness("app:handle", app_dir=tmp_path) as child:
        assert child.run()["reason"] == "True 0"


# --- the process ------------------------------------------------------------------------------------------------------


def test_our_descriptors_are_private() -> None:
    """No program that a handler starts inherits them."""
    code = """
import subprocess
listing = subprocess.check_output(["ls", "/proc/self/fd"], close_fds=False, text=True)
result = message.dead_letter(listing)
"""
    with ChildHarness("plain:execute") as child:
        assert child.run(code)["reason"].split() == ["0", "1", "2", "3"]  # 3 is the listing's own


def test_a_program_of_the_handler_has_the_usual_signals() -> None:
    """We shrug with functions, which exec resets; SIG_IGN would be inherited."""
    code = """
import signal, subprocess, sys
program = "import signal; print([int(signal.getsignal(n) is signal.SIG_IGN) for n in (1, 2, 15)])"
result = message.dead_letter(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
"""
    with ChildHarness("plain:execute") as child:
        assert child.run(code)["reason"] == "[0, 0, 0]"


def test_a_child_does_not_push_others_off_the_processor() -> None:
    """It has the class for batch work, and its handler may have another one."""
    with ChildHarness("plain:succeed") as child:
        assert os.sched_getscheduler(child.pid) == os.SCHED_BATCH


def test_the_oom_score_is_raised() -> None:
    """The kernel takes the child before the parent."""
    with ChildHarness("plain:succeed", hello={"oom_score_adj": 321}) as child:
        assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) >= 321


def test_a_dead_parent_takes_the_child_with_it(tmp_path: Path) -> None:
    """PDEATHSIG reaches it inside a handler."""
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.support.childharness import ChildHarness
child = ChildHarness("plain:sleep")
child.start(60)
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(DEADLINE_S)
        eventually(lambda: not alive(pid), what="the end of the child")


def alive(pid: int) -> bool:
    """Whether it runs; an unreaped zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_importing_a_child_is_light() -> None:
    """No asyncio and no psycopg for a plain handler."""
    with ChildHarness("plain:show", app_dir=HANDLERS) as child:
        loaded = child.run("sorted({'psycopg', 'pydantic', 'typer', 'setuptools'} & set(sys.modules))")["reason"]
        assert loaded == "[]"

"""Hostile handlers, seen from outside: each harms its own message and no other, and none is taken for a success."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.running import Stage, stage
from tests.support.waiting import eventually

CONFIG = """
[queues.jobs]
handler = "tasks:handle"
mode = "{mode}"
concurrency = 2
max_attempts = 1
max_deaths = 1
hard_timeout = "20s"
on_success = "archive"
[queues.calm]
handler = "tasks:calm"
on_success = "archive"
"""

TASKS = """
import asyncio, ctypes, gc, os, signal, sys, threading, time
class Unshown(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__
class Exiting(Exception):
    def __reduce__(self): os._exit(5)
class Final(Exception):
    permanent = True
def handle(message, tx=None):
    exec(message.body, {**globals(), "message": message})
def calm(message):
    time.sleep(0.01)
"""

GARBAGE = """
for name in os.listdir("/proc/self/fd"):
    try: os.write(int(name), os.urandom(999))
    except OSError: pass
"""

FAILED, FINAL, REJECTED, DIED = "attempts_exhausted", "failed", "rejected", "died"
EXPECTED = {
    "raise ValueError('a\\x00b\\ud800c')": (FAILED, None),
    "raise ValueError('\\x00\\xe9\\udfff' * 3_000_000)": (FAILED, None),
    "raise Unshown": (FAILED, None),
    "raise Exiting": (FAILED, None),
    "raise asyncio.CancelledError": (FAILED, None),
    "raise BrokenPipeError": (FAILED, None),
    "raise KeyboardInterrupt": (FAILED, None),
    "sys.exit(0)": (FAILED, None),
    "f = lambda: f()\nf()": (FAILED, None),
    "[0] * 10**15": (FAILED, None),
    "os.fork()\nraise ValueError('both')": (FAILED, None),
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nraise ValueError": (FAILED, None),
    "sys.modules.clear()\nraise ValueError": (FAILED, None),
    "for fd in (0, 1, 2): os.close(fd)\nraise ValueError": (FAILED, None),
    "raise Final": (FINAL, None),
    "message.retry(-5)": (FINAL, None),
    "message.retry(float('nan'))": (FINAL, None),
    "message.retry(10**30)": (FINAL, None),
    "raise message.dead_letter('\\x00\\ud800' * 100_000)": (REJECTED, None),
    "os._exit(0)": (DIED, "exit"),
    "os.execv('/bin/true', ['true'])": (DIED, "exit"),
    "os.execv('/bin/sleep', ['sleep', '600'])": (DIED, "protocol"),
    "os.kill(os.getpid(), signal.SIGRTMIN + 3)": (DIED, "signal"),
    "os.closerange(3, 1025)": (DIED, "exit"),
    GARBAGE: (DIED, "protocol"),
}
HARMLESS = [
    "assert sys.stdin.read() == ''",
    "os.fork()",
    "threading.Thread(target=time.sleep, args=(600,)).start()",
    "import atexit\natexit.register(time.sleep, 600)",
    "print('x' * 50_000_000)",
]


@pytest.mark.parametrize("mode", ["regular", "transactional"])
def test_each_hostile_handler_harms_its_own_message_only(tmp_path: Path, database: str, mode: str) -> None:
    """What each leads to, by reason and cause; the calm queue beside them loses nothing, and the stop is clean."""
    with stage(tmp_path, database, CONFIG.format(mode=mode), TASKS) as on:
        on.create("jobs", "calm")
        bodies = dict(zip(on.send(*EXPECTED, *HARMLESS), [*EXPECTED, *HARMLESS], strict=True))
        on.send(*range(200), queue="calm")
        on.service.start()
        on.until_empty("calm")
        on.until_empty(timeout_s=90)
        assert on.service.stop() == 0
        found = {
            bodies[letter["source"]["msg_id"]]: (letter["reason"], (letter["death"] or {}).get("cause"))
            for letter in on.letters()
        }
        assert found == EXPECTED
        assert sorted(body for body, _ in on.archived()) == sorted(HARMLESS)
        assert {read_ct for _, read_ct in on.archived("calm")} == {1}
        assert not [end for end in on.events("child.ended") if end["queue"] == "calm"]


IMPORTS = {
    "exits": ("import sys\nsys.exit(0)", "SystemExit"),
    "ends": ("import os\nos._exit(0)", "exit code 0"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "misses": ("import no_such_library", "no_such_library"),
    "closes": ("import os\nos.closerange(3, 1025)", "exit code 79"),
    "scribbles": ("import os\n" + GARBAGE, "protocol"),
    "mistyped": ("def (", "SyntaxError"),
}
WORKS = {
    "prints": "import sys\nfor _ in range(1 << 16): sys.stdout.write('x' * 1023 + '\\n')",
    "forks": "import os\nos.fork()",
    "starts_threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    "clears": "import sys\nsys.argv[:] = sys.path[:] = []",
    "shrugs": "import signal\nfor n in (1, 2, 10, 15): signal.signal(n, signal.SIG_IGN)",
}


@pytest.mark.timeout(180)
def test_hostile_imports_park_their_own_queue(tmp_path: Path, database: str) -> None:
    """A clear line each, nothing of theirs is claimed; what only behaves badly works, and so do the others."""
    config = '[queues.good]\nhandler = "tasks:calm"\n'
    for name, (source, _) in IMPORTS.items():
        (tmp_path / f"{name}.py").write_text(source + "\ndef handle(message): ...\n")
        config += f'[queues.{name}]\nhandler = "{name}:handle"\n'
    for name, source in WORKS.items():
        (tmp_path / f"{name}.py").write_text(source + "\ndef handle(message): ...\n")
        config += f'[queues.{name}]\nhandler = "{name}:handle"\n'
    with stage(tmp_path, database, config, TASKS) as on:
        on.create("good", *IMPORTS, *WORKS)
        for queue in ("good", *IMPORTS, *WORKS):
            on.send(1, queue=queue)
        on.service.start()
        for queue in ("good", *WORKS):
            on.until_empty(queue, timeout_s=60)
        eventually(
            lambda: {event["queue"] for event in on.events("queue.parked")} == set(IMPORTS),
            timeout_s=90,
            what="the parking of all that cannot be imported",
        )
        assert on.service.stop() == 0
        reasons = {event["queue"]: event["why"] for event in on.events("queue.parked")}
        assert not [name for name, (_, said) in IMPORTS.items() if said not in reasons[name]], reasons
        assert [on.rows(f"SELECT read_ct FROM pgmq.q_{name}") for name in IMPORTS] == [[(0,)]] * len(IMPORTS)
        assert on.service.log_file.stat().st_size < 5_000_000


def test_output_belongs_to_its_message_whatever_else_is_printed(tmp_path: Path, database: str) -> None:
    """Lines of code, of programs and of C, with and without an end, on four children beside one that never stops."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 4
    on_success = "archive"
    [queues.loud]
    handler = "tasks:loud"
    """
    tasks = """
    import os, subprocess, sys
    def handle(message):
        print("line", message.body)
        if message.body % 10 == 0:
            subprocess.run(["echo", "program", str(message.body)])
        os.write(2, b"unfinished %d" % message.body)
    def loud(message):
        line = "x" * 1023 + "\\n"
        for _ in range(1 << 18):
            sys.stdout.write(line)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create("jobs", "loud")
        on.send(1, queue="loud")
        bodies = dict(zip(on.send(*range(120)), range(120), strict=True))
        on.service.start()
        on.until_empty()
        on.until_empty("loud")
        assert on.service.stop() == 0
        said = [(event["msg_id"], event["line"]) for event in on.events("child.output") if event["queue"] == "jobs"]
        assert len(said) == 120 * 2 + 12
        assert not [line for msg_id, line in said if int(line.split()[-1]) != bodies[msg_id]]
        assert on.service.log_file.stat().st_size < 3_000_000


def test_code_that_nobody_ran_is_not_acknowledged(tmp_path: Path, database: str) -> None:
    """A generator behind a decorator and a forgotten await: failures with a reason, not successes."""
    config = "".join(
        f'[queues.{name}]\nhandler = "tasks:{name}"\nmax_attempts = 1\n' for name in ("yields", "forgets", "drives")
    )
    tasks = """
    import functools
    def plain(handler):
        @functools.wraps(handler)
        def call(message): return handler(message)
        return call
    def driven(handler):
        @functools.wraps(handler)
        def call(message): list(handler(message))
        return call
    @plain
    def yields(message): yield message
    @driven
    def drives(message): yield message
    async def work(message): ...
    async def forgets(message): return work(message)
    """

    def reasons(on: Stage, queue: str) -> list[str]:
        return [letter["error"]["type"] for letter in on.letters(queue)]

    with stage(tmp_path, database, config, tasks) as on:
        on.create("yields", "forgets", "drives")
        for queue in ("yields", "forgets", "drives"):
            on.send(1, queue=queue)
        on.service.start()
        for queue in ("yields", "forgets", "drives"):
            on.until_empty(queue)
        assert on.service.stop() == 0
        assert reasons(on, "yields") == reasons(on, "forgets") == ["NothingRun"]
        assert reasons(on, "drives") == []

"""Deaths, hangs and left-overs, seen from outside: the guilty message is blamed, no other one notices."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.support.running import stage
from tests.support.waiting import eventually


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_message_that_always_dies_is_dead_lettered_and_the_others_do_not_notice(
    tmp_path: Path, database: str
) -> None:
    """One of 1 000 segfaults at each attempt, on 4 slots: three deaths, growing gaps; 999 succeed at once."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 4
    on_success = "archive"
    retry = { base = "100ms", jitter = false }
    """
    tasks = """
    import ctypes
    def handle(message):
        if message.body == 500:
            ctypes.string_at(0)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(*range(1, 1001))
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        archived = on.archived()
        assert len(archived) == 999
        assert {read_ct for _, read_ct in archived} == {1}
        [letter] = on.letters()
        assert letter["reason"] == "died"
        assert letter["death"]["signal"] == "SIGSEGV"
        assert letter["source"]["deaths"] == 3
        assert "in handle" in letter["death"]["stack"]
        assert [event["delay_ms"] for event in on.events("message.retried")] == [100, 200]


@pytest.mark.parametrize(
    ("body", "cause", "signal_name", "exit_code"),
    [
        ("os.kill(os.getpid(), 4)", "signal", "SIGILL", None),
        ("os.abort()", "signal", "SIGABRT", None),
        ("os.kill(os.getpid(), 7)", "signal", "SIGBUS", None),
        ("os._exit(1)", "exit", None, 1),
        ("os._exit(0)", "exit", None, 0),
        ("os.execv('/bin/true', ['true'])", "exit", None, 0),
    ],
)
def test_each_way_to_die_has_its_name(
    tmp_path: Path, database: str, body: str, cause: str, signal_name: str | None, exit_code: int | None
) -> None:
    """The dead letter names cause, signal or exit code, last output and peak memory; a clean exit is no success."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    max_deaths = 1
    """
    tasks = f"""
    import os, sys
    def handle(message):
        sys.stdout.write("last words without a newline")
        {body}
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(1)
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        [letter] = on.letters()
        death = letter["death"]
        assert (death["cause"], death["signal"], death["exit_code"]) == (cause, signal_name, exit_code)
        assert letter["reason"] == "died"
        assert "last words without a newline" in death["output_tail"]
        assert death["max_rss_kb"] > 5_000


HANGS = {
    "sleeps": "time.sleep(3600)",
    "ignores everything": """signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass""",
    "blocks signals": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(3600)",
    "holds the GIL in C": "re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "waits for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@pytest.mark.parametrize("hang", HANGS)
def test_what_hangs_is_dead_at_its_hard_limit_with_its_stack(tmp_path: Path, database: str, hang: str) -> None:
    """Dead at the limit within half a second, the stack says where it was, and the slot takes the next message."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    hard_timeout = "1s"
    max_deaths = 1
    on_success = "archive"
    """
    tasks = f"""
    import re, signal, threading, time
    def handle(message):
        if message.body == "fine":
            return
        {HANGS[hang]}
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send("hang", "fine")
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        [letter] = on.letters()
        assert letter["reason"] == letter["death"]["cause"] == "hard_timeout"
        assert "in handle" in letter["death"]["stack"]
        [dead] = on.events("message.dead_lettered")
        assert 1.0 <= dead["handler_s"] <= 1.5
        assert [body for body, _ in on.archived()] == ["fine"]


def test_a_supervisor_that_is_killed_leaves_nothing_and_its_work_comes_back(tmp_path: Path, database: str) -> None:
    """SIGKILL of the parent: children in C code and their daemons are gone in a second; leases bring the work back."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "3s"
    concurrency = 2
    on_success = "archive"
    """
    tasks = """
    import os, re, subprocess
    def handle(message):
        if message.attempt > 1:
            return
        daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        forked = os.fork()
        if forked == 0:
            os.setsid()
            while True:
                pass
        print("pids", os.getpid(), daemon.pid, forked, flush=True)
        re.match(r"(a+)+$", "a" * 64 + "b")
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(1, 2)
        on.service.start()
        eventually(lambda: on.service.log.count("pids ") == 2, timeout_s=60, what="two busy children")
        lines = [event["line"] for event in on.events("child.output")]
        pids = [int(word) for line in lines for word in line.split()[1:]]
        assert len(pids) == 6
        on.service.kill()
        eventually(lambda: not any(map(alive, pids)), timeout_s=1.5, what="the end of children and grandchildren")
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        assert [read_ct for _, read_ct in on.archived()] == [2, 2]


def test_a_supervisor_frozen_beyond_its_leases_does_no_harm_when_it_goes_on(tmp_path: Path, database: str) -> None:
    """SIGSTOP for more than a lease: the guard kills its child; afterwards exactly one acknowledgement."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    visibility_timeout = "2s"
    on_success = "archive"
    """
    tasks = """
    import os, time
    def handle(message):
        print("pid", os.getpid(), flush=True)
        if message.deliveries == 1:
            time.sleep(3600)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send(1)
        on.service.start()
        on.service.wait_for_log("pid ")
        [event] = on.events("child.output")
        child = int(event["line"].split()[1])
        on.service.signal(signal.SIGSTOP)
        eventually(lambda: not alive(child), timeout_s=4, what="the end of the child of a frozen parent")
        eventually(
            lambda: on.rows("SELECT count(*) FROM pgmq.q_jobs WHERE vt <= clock_timestamp()")[0][0] == 1,
            timeout_s=5,
            what="the end of the lease",
        )
        on.service.signal(signal.SIGCONT)
        on.until_empty()
        assert on.service.stop() == 0
        assert len(on.archived()) == 1


def test_a_memory_limit_kills_the_child_alone(tmp_path: Path, database: str) -> None:
    """An endless allocation is stopped at the limit; the dead letter says memory_limit, others go on."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    memory_limit = "150MB"
    max_deaths = 1
    concurrency = 2
    on_success = "archive"
    """
    tasks = """
    import time
    def handle(message):
        if message.body == "eat":
            hoard = []
            while True:
                hoard.append(bytearray(4 << 20))
                time.sleep(0.01)
        time.sleep(1)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.send("eat", "fine")
        on.service.start()
        on.until_empty()
        assert on.service.stop() == 0
        [letter] = on.letters()
        assert letter["reason"] == letter["death"]["cause"] == "memory_limit"
        assert 100_000 < letter["death"]["max_rss_kb"] < 400_000
        assert [body for body, _ in on.archived()] == ["fine"]


def test_two_hundred_kills_lose_no_slot_no_descriptor_and_leave_no_zombie(tmp_path: Path, database: str) -> None:
    """After 200 deaths in a row the slots work, the parent's descriptors are as many as before, nothing is defunct."""
    config = """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 4
    standby = 1
    max_deaths = 1
    on_success = "archive"
    """
    tasks = """
    import os, signal
    def handle(message):
        if message.body == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        on.service.start()
        on.send("fine")
        on.until_empty()
        parent = on.service.pid

        def descriptors() -> dict[str, int]:
            folder = Path(f"/proc/{parent}/fd")
            kinds = Counter(os.readlink(file).partition(":")[0] for file in folder.iterdir())
            # Database sessions are opened when they are needed; what belongs to a child comes and goes with it.
            return {kind: kinds[kind] for kind in ("anon_inode", "pipe", "/memfd")}

        def children() -> list[str]:
            return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()

        def kill(count: int) -> None:
            on.send(*(["kill"] * count), "fine")
            on.until_empty(timeout_s=120)
            eventually(lambda: len(children()) == 5 + 1, timeout_s=60, what="five children and the guard")

        kill(20)
        before = descriptors()
        kill(180)
        eventually(lambda: descriptors() == before, timeout_s=10, what=f"the same descriptors as before, {before}")
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children()]
        assert "Z" not in states
        assert len(on.letters()) == 200
        assert on.service.stop() == 0

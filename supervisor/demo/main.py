"""The demo's course: a database, messages, the supervisor as a real service process, a live view, an account."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console

from shared.errors import ProcessError
from supervisor.demo.account import LEDGER, QUEUES, REGULAR
from supervisor.demo.plan import EVERY_KIND, FEWEST, compose
from supervisor.demo.view import show_account, watch
from supervisor.embedded import install_pgmq, resolve_dsn

_APP: Final = Path(__file__).parent / "app"
_PROGRAM: Final = Path(__file__).parents[2] / "pgmq_supervisor.py"
_PATIENCE_S: Final = 120.0
_STOP_PATIENCE_S: Final = 40.0

_CONFIG: Final = """\
# What the demo runs. Limits are short, so that you need not wait for them.
[shutdown]
grace = "10s"

[queues.demo]
handler = "demo_tasks:handle"
concurrency = 4
visibility_timeout = "10s"
hard_timeout = "2s"
memory_limit = "128MB"
on_success = "archive"
max_attempts = 3
max_deaths = 2
retry = { base = "200ms", factor = 2, max = "1s" }

[queues.demo_ledger]
handler = "demo_tasks:book"
mode = "transactional"
concurrency = 2
on_success = "archive"
retry = { base = "200ms", factor = 2, max = "1s" }
"""


def main(messages: int, plain: bool) -> int:
    """Run the demo; 0 when every message is accounted for, else 1."""
    console = Console(force_terminal=False if plain else None, highlight=False)
    live = console.is_terminal and not plain
    total = max(messages, FEWEST)
    if total > messages:
        console.print(f"{messages} messages are too few to show every kind: {total} are sent")

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(resolve_dsn("embedded", base=Path.cwd(), say=say))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgmq-supervisor-demo-")))
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        sent = _prepare(connection, total)
        console.print(f"sent {sum(sent.values())} messages to the queues {', '.join(QUEUES)}")
        daemons = folder / "daemons"
        log = folder / "log"
        with _service(dsn, folder, daemons, log) as service:
            account = watch(console, connection, sent, service, live=live, patience_s=_PATIENCE_S)
            code = _stop(service)
        left_daemons = _alive(daemons)
        show_account(console, account, code, left_daemons, plain=not live)
        if not account.closed or code != 0 or left_daemons:
            _explain(console, log)
        console.print(account.line(), soft_wrap=True)
        return 0 if account.closed and code == 0 and not left_daemons else 1


def _prepare(connection: psycopg.Connection[Any], total: int) -> dict[str, int]:
    """Fresh queues, the ledger's table, and the messages; gives how many of each kind were sent."""
    connection.execute("SET client_min_messages TO warning")
    install_pgmq(connection)
    connection.execute("CREATE TABLE IF NOT EXISTS demo_ledger (n bigint PRIMARY KEY, amount bigint NOT NULL)")
    connection.execute("TRUNCATE demo_ledger")
    for queue in QUEUES:
        for name in (queue, f"{queue}_dlq"):
            connection.execute("SELECT pgmq.drop_queue(queue_name) FROM pgmq.meta WHERE queue_name = %s", (name,))
            connection.execute("SELECT pgmq.create(%s)", (name,))
    sent: Counter[str] = Counter()
    for queue, messages in zip((REGULAR, LEDGER), compose(total), strict=True):
        for kind, _ in messages:
            sent[kind.name] += 1
        bodies = [body for _, body in messages]
        connection.execute("SELECT pgmq.send_batch(%s, %s::text[]::jsonb[])", (queue, bodies))
    return {kind.name: sent[kind.name] for kind in EVERY_KIND if kind.name in sent}


@contextlib.contextmanager
def _service(dsn: str, folder: Path, daemons: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `pgmq-supervisor run` as anybody would; killed on the way out if it is still there."""
    config = folder / "supervisor.toml"
    config.write_text(_CONFIG)
    environment = {**os.environ, "DEMO_DAEMONS": str(daemons), "SUPERVISOR_DATABASE__DSN": dsn}
    environment.pop("SUPERVISOR_DSN", None)
    command = [sys.executable, str(_PROGRAM), "run", "--config", str(config), "--app-dir", str(_APP)]
    with log.open("wb") as output:
        service = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
    try:
        yield service
    finally:
        if service.poll() is None:
            service.terminate()
            try:
                service.wait(_STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()


def _stop(service: subprocess.Popen[bytes]) -> int:
    """TERM, as a deploy does; gives the exit code."""
    if service.poll() is None:
        service.send_signal(signal.SIGTERM)
    try:
        return service.wait(_STOP_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise ProcessError(
            f"the service did not stop within {_STOP_PATIENCE_S:g} s of TERM", remedy="this is a defect: report it"
        ) from error


def _alive(daemons: Path) -> list[int]:
    """Which of the daemons that handlers left behind still run."""
    if not daemons.exists():
        return []
    deadline = time.monotonic() + 2.0
    pids = [int(line) for line in daemons.read_text().split()]
    while True:
        alive = [pid for pid in pids if _is_sleep(pid)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def _is_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    except OSError:
        return False


def _explain(console: Console, log: Path) -> None:
    """The service's last words, for an account that does not close."""
    lines = log.read_text(errors="replace").splitlines()[-40:]
    console.print("the service's last lines:")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)

"""A redrive asked of a running supervisor: its answer comes, however long the whole would take."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from supervisor.control.client import ask
from supervisor.preparing import REDRIVE_S
from tests.support.running import Stage, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch

REJECTING = """
    import os
    def handle(message):
        if not os.path.exists("mended"):
            return message.dead_letter("not yet")
"""


def post(on: Stage, path: str, body: object) -> dict[str, Any]:
    """Ask by HTTP, with the token."""
    [port] = [event["port"] for event in on.events("http")]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Authorization": "Bearer secret"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own server
        found: dict[str, Any] = json.loads(answer.read())
        return found


def test_a_redrive_answers_in_time_and_says_what_is_left(tmp_path: Path, database: str) -> None:
    """One a minute by HTTP: one went back, the rest is left and said to be. Then all of it, by the control socket."""
    socket = tmp_path / "control"
    config = f"""
    {HTTP}token = "secret"
    [control]
    socket = "{socket}"
    [queues.jobs]
    handler = "tasks:handle"
    on_success = "archive"
    """
    with stage(tmp_path, database, "\n".join(map(str.strip, config.splitlines())), REJECTING) as on:
        on.create()
        on.send(*range(150))
        on.service.start()
        Watch(on.service).until_ready()
        on.until_empty()
        assert len(on.letters()) == 150
        (tmp_path / "mended").touch()
        began = time.monotonic()
        answer = post(on, "/api/queues/jobs/dlq/redrive", {"all": True, "rate": 1 / 60})
        assert REDRIVE_S - 1 < time.monotonic() - began < 2 * REDRIVE_S
        assert (answer["redriven"], answer["more"], answer["note"]) == (1, True, "more left: call again")
        answer = ask(socket, "redrive", queue="jobs", all=True)
        assert (answer["redriven"], answer["more"], answer["note"]) == (149, False, None)
        eventually(lambda: len(on.archived()) == 150, timeout_s=60, what="all of them")
        assert on.letters() == []
        assert on.service.stop() == 0

"""The host's wall clock jumps while messages are being worked on: leases do not know that clock."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from tests.support.running import runs, stage
from tests.support.waiting import eventually
from tests.support.watch import HTTP, Watch, pass_time

# The machine's own clock is not ours to set. Every Python process of the service loads this at its start, so that the
# wall clock that it sees, and no other one, is as far off as the file says.
SHIFTED_CLOCK = """
import os, time
_time, _time_ns, _clock_gettime = time.time, time.time_ns, time.clock_gettime
def _offset_s():
    with open(os.environ["SHIFT_FILE"]) as file:
        return float(file.read() or 0)
time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + int(_offset_s() * 1e9)
time.clock_gettime = lambda clock: _clock_gettime(clock) + (_offset_s() if clock == time.CLOCK_REALTIME else 0)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("first_s", [600, -600])
def test_a_jump_of_the_host_clock_duplicates_nothing_and_stops_nobody(
    tmp_path: Path, database: str, first_s: int
) -> None:
    """Minutes forward and back in mid-task, in parent and children: one run, one delivery each, renewed in time."""
    config = (
        HTTP
        + """
    [queues.jobs]
    handler = "tasks:handle"
    concurrency = 2
    visibility_timeout = "3s"
    soft_timeout = "60s"
    hard_timeout = "120s"
    on_success = "archive"
    """
    )
    tasks = """
    import time
    def handle(message):
        with open("ran", "a") as file:
            file.write(f"{message.id} {message.attempt}\\n")
        until = time.monotonic() + message.body
        while time.monotonic() < until:
            print("still here", flush=True)
            time.sleep(0.2)
    """
    shift, library = tmp_path / "shift", tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(SHIFTED_CLOCK)

    def jump(offset_s: int) -> None:
        shift.with_suffix(".new").write_text(str(offset_s))
        shift.with_suffix(".new").rename(shift)

    with stage(tmp_path, database, config, tasks) as on:
        on.create()
        jump(0)
        on.send(12, 12)
        on.service.start(env={"PYTHONPATH": str(library), "SHIFT_FILE": str(shift)})
        watch = Watch(on.service)
        eventually(lambda: len(runs(tmp_path)) == 2, timeout_s=30, what="two running handlers")
        for offset_s in (first_s, -300, 0):
            jump(offset_s)
            pass_time(2)
            assert watch.is_live
        on.send(0)
        on.until_empty(timeout_s=60)
        assert on.service.stop() == 0
        assert [read_ct for _, read_ct in on.archived()] == [1, 1, 1]
        assert len(runs(tmp_path)) == 3
        assert on.events("lease.lost") == on.events("child.ended") == []
        seen = [datetime.fromisoformat(event["time"]).timestamp() for event in on.events("child.output")]
        assert max(seen) - min(seen) > 290, "the clock did not jump"

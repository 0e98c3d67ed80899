"""One trial of a user's handler: a message, a kill at one place, and what effects there are in the end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import psycopg

from crashtests.kill_points import Mode
from crashtests.ledger import Sent
from crashtests.nemesis import Order, Victim, struck
from crashtests.processes import Process, wait_until
from crashtests.rendezvous import Meeting, NotReached
from crashtests.scene import Scene, scene
from crashtests.stage import Queue
from crashtests.users.probe import Counts, Probe

__all__ = ["End", "Place", "Seen", "Subject", "Theatre", "theatre"]

QUEUE: Final = "crash_yours"
LEASE_S: Final = 2.0
_WRAPPER: Final = Path(__file__).parent / "wrapper"
_REACH_S: Final = 60.0
_GONE_S: Final = 10.0
_OPTIONS: Final = {
    "visibility_timeout": f'"{LEASE_S:g}s"',
    "retry": '{ base = "200ms", factor = 1, max = "200ms", jitter = false }',
    "polling_interval": '"1s"',
    "on_success": '"archive"',
}
_ASKS: Final = frozenset({"parent.claim.before", "child.tx.before_claim"})


class End(StrEnum):
    """What became of the message."""

    ACKNOWLEDGED = "acknowledged"
    DEAD_LETTERED = "dead-lettered"
    OPEN = "not finished"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tried out. `body` may have {operation_id} in its texts."""

    handler: str
    mode: Mode
    app_dir: Path
    body: object
    message_limit_s: float = 60.0

    def body_for(self, operation_id: str) -> Any:
        """The body of one message."""
        return json.loads(json.dumps(self.body).replace("{operation_id}", operation_id))


@dataclass(frozen=True, slots=True)
class Place:
    """Where somebody is killed. `line`: before the n-th line that the handler runs, `text` says which one that is."""

    point: str
    victim: Victim
    at: str
    line: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a trial showed. `between`: the effects at the instant of the kill; None where they cannot be counted."""

    end: End
    counts: Counts
    between: Counts | None
    attempts: int
    note: str = ""


class Theatre:
    """A scene for trials, one after the other."""

    def __init__(self, place: Scene, subject: Subject, probe: Probe, line_file: Path, dsn: str) -> None:
        """See `theatre`."""
        self._scene = place
        self._subject = subject
        self._probe = probe
        self._line_file = line_file
        self._dsn = dsn

    @property
    def scene(self) -> Scene:
        """The scene."""
        return self._scene

    # --- a trial without a kill -------------------------------------------------------------------------------------

    def watch(self, *, hold_at: str | None = None) -> Seen:
        """Let one message be handled; `between` are the effects while it stands at `hold_at`."""
        self._line_file.write_text("-1")
        with self._message() as (sent, count):
            trap = self._scene.points.trap(hold_at) if hold_at else None
            self._scene.reveal(sent)
            between = None
            if trap is not None:
                with contextlib.closing(trap.wait(_REACH_S)) as meeting:
                    between = count()
                    meeting.release()
            return self._finish(sent, count, between, wait_stable=True)

    def lines(self) -> list[str]:
        """Let one message be handled and give the application's lines in the order in which they ran."""
        self._line_file.write_text("0")
        with self._message() as (sent, count):
            trap = self._scene.points.trap("handler.lines")
            self._scene.reveal(sent)
            with contextlib.closing(trap.wait(_REACH_S)) as meeting:
                self._line_file.write_text("-1")
                places = list(meeting.crossing.ids["places"])
                meeting.release()
            self._finish(sent, count, None)
            return places

    # --- a trial with one -------------------------------------------------------------------------------------------

    def kill(self, where: Place, *, enough: Counts) -> Seen:
        """Kill there. Raises `NotReached` where nobody comes there. `enough`: effects that need not be waited for."""
        points = self._scene.points
        self._line_file.write_text(str(where.line if where.line is not None else -1))
        with self._message() as (sent, count), contextlib.ExitStack() as stack:
            trap = points.trap(where.at)
            # Before a claim somebody must stand there first: a claim that is under way could take the message.
            if where.at in _ASKS:
                meeting = stack.enter_context(contextlib.closing(trap.wait(_REACH_S)))
                self._scene.reveal(sent)
            else:
                self._scene.reveal(sent)
                meeting = stack.enter_context(contextlib.closing(trap.wait(_REACH_S)))
            self._line_file.write_text("-1")
            child = stack.enter_context(contextlib.closing(self._child(meeting)))
            with struck(where.victim, parent=self._scene.stage.parent, child=child, order=Order.CHILD_FIRST):
                between = count()
            if where.victim is Victim.CHILD:
                meeting.release()
            else:
                self._start_again()
            return self._finish(sent, count, between, enough=enough)

    def _start_again(self) -> None:
        stage, points = self._scene.stage, self._scene.points
        if stage.wait_for_silence(_GONE_S):
            raise NotReached("processes outlive their supervisor")
        before = len(points.crossings)
        stage.start()
        if not wait_until(lambda: any(found.point in _ASKS for found in points.crossings[before:]), _REACH_S):
            raise NotReached("the new supervisor did not ask for messages")

    def _child(self, meeting: Meeting) -> Process:
        if meeting.crossing.process != "parent":
            return Process(meeting.crossing.pid)
        for boot in reversed(self._scene.points.crossings):
            if boot.point == "child.boot.ready":
                with contextlib.suppress(ProcessLookupError):
                    process = Process(boot.pid)
                    if not process.gone:
                        return process
                    process.close()
        raise NotReached("no child lives")

    # --- messages ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _message(self) -> Iterator[tuple[Sent, Callable[[], Counts]]]:
        """Send one, invisible yet, and count its effects from what there was before."""
        operation_id = secrets.token_hex(8)
        body = self._subject.body_for(operation_id)
        found = (
            self._scene.session().execute("select pgmq.send(%s, %s::jsonb, 3600)", [QUEUE, json.dumps(body)]).fetchone()
        )
        assert found is not None
        sent = Sent(operation_id, QUEUE, int(found[0]))

        def ask() -> Counts:
            return self._probe.ask(body=body, operation_id=operation_id, msg_id=sent.msg_id, dsn=self._dsn)

        before = ask()
        self._scene.stage.start()
        try:
            yield sent, lambda: {name: value - before.get(name, 0) for name, value in ask().items()}
        finally:
            self._scene.points.disarm()

    def _finish(
        self,
        sent: Sent,
        count: Callable[[], Counts],
        between: Counts | None,
        *,
        enough: Counts | None = None,
        wait_stable: bool = False,
    ) -> Seen:
        """Wait for the end of the message, and for effects that come a moment later."""
        ended = self._scene.wait_ended([sent], self._subject.message_limit_s)
        read_ct = self._scene.archived_read_ct(sent)
        end = End.OPEN if not ended else End.DEAD_LETTERED if read_ct is None else End.ACKNOWLEDGED
        counts = count()
        deadline = time.monotonic() + (2.0 if wait_stable or _lacks(counts, enough) else 0.0)
        while time.monotonic() < deadline and (wait_stable or _lacks(counts, enough)):
            time.sleep(0.25)
            later = count()
            if wait_stable and later == counts and any(later.values()):
                break
            counts = later
        return Seen(end, counts, between, read_ct or 0, "" if ended else self._scene.stage.log_tail())


def _lacks(counts: Counts, enough: Counts | None) -> bool:
    return enough is not None and any(counts.get(name, 0) < value for name, value in enough.items())


@contextlib.contextmanager
def theatre(dsn: str, subject: Subject, probe: Probe, *, wrapped: bool, first_id: int = 1) -> Iterator[Theatre]:
    """Set one up on a database. `wrapped`: the handler can be held before its lines. Ids begin at `first_id`."""
    handler = "crash_wrapper:handle" if wrapped else subject.handler
    queue = Queue(QUEUE, handler, str(subject.mode), _OPTIONS)
    with contextlib.ExitStack() as stack:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.fspath(_WRAPPER)]))
        environ = {"CRASHTESTS_HANDLER": subject.handler, "CRASHTESTS_APP": os.fspath(subject.app_dir)}
        place = stack.enter_context(
            scene(dsn, {QUEUE: queue}, app_dir=subject.app_dir, environ={**environ, "PYTHONPATH": path})
        )
        line_file = place.stage.folder / "line"
        line_file.write_text("-1")
        place.stage.add_environ({"CRASHTESTS_LINE": os.fspath(line_file)})
        place.create_queues()
        with contextlib.suppress(psycopg.Error):  # an owner of other rights goes on with ids from 1
            place.session().execute(f"alter table pgmq.q_{QUEUE} alter column msg_id restart with {first_id:d}")
        yield Theatre(place, subject, probe, line_file, dsn)

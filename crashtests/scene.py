"""A scene: a stage with its database, ledger and sync points; messages go in, the truth comes out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg

from crashtests.ground import Session, connect, private_folder
from crashtests.ledger import Entry, Row, Sent, Truth, read_ledger, read_row, read_truth
from crashtests.processes import title_of, wait_until
from crashtests.rendezvous import Rendezvous
from crashtests.stage import Queue, Stage

__all__ = ["REGULAR", "TRANSACTIONAL", "Scene", "scene", "usual_queues"]

REGULAR: Final = "crash_regular"
TRANSACTIONAL: Final = "crash_tx"
LEASE_S: Final = 3.0
BACKOFF_S: Final = 0.4
_HIDDEN_S: Final = 3600
_SILENCE_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.01

_USUAL: Final = {
    "visibility_timeout": f'"{LEASE_S:g}s"',
    "retry": f'{{ base = "{BACKOFF_S:g}s", factor = 1, max = "{BACKOFF_S:g}s", jitter = false }}',
    "polling_interval": '"1s"',
    "on_success": '"archive"',
    "hard_timeout": '"60s"',
}


def usual_queues(**more: str) -> dict[str, Queue]:
    """One queue a mode, with short times; `more` are options of both."""
    options = {**_USUAL, **more}
    return {
        REGULAR: Queue(REGULAR, "crash_tasks:handle", "regular", options),
        TRANSACTIONAL: Queue(TRANSACTIONAL, "crash_tasks:book", "transactional", options),
    }


class Scene:
    """Owns a session of its own, which it opens again when it was lost."""

    def __init__(self, stage: Stage, points: Rendezvous | None, ledger: Path, queues: Sequence[str], dsn: str) -> None:
        """`dsn` is the way to the database that no proxy stands in."""
        self.stage = stage
        self.ledger = ledger
        self.queues = list(queues)
        self.sent: list[Sent] = []
        self._points = points
        self._dsn = dsn
        self._session: Session | None = None

    @property
    def points(self) -> Rendezvous:
        """The sync points, where they are on."""
        assert self._points is not None, "this scene has no sync points"
        return self._points

    def session(self) -> Session:
        """The harness's own session. Raises `psycopg.OperationalError` while the server is down."""
        if self._session is None or self._session.closed or self._session.broken:
            self._session = connect(self._dsn)
        return self._session

    def close(self) -> None:
        """Let the session go."""
        if self._session is not None:
            self._session.close()

    # --- messages ---------------------------------------------------------------------------------------------------

    def create_queues(self) -> None:
        """Make them before a supervisor does, so that messages can be there first."""
        for queue in self.queues:
            self.session().execute("select pgmq.create(%s)", [queue])

    def send(self, queue: str, op: str, **body: Any) -> Sent:
        """Send one message."""
        return self._sent(queue, op, 0, body)

    def send_hidden(self, queue: str, op: str, **body: Any) -> Sent:
        """Send one that nobody can claim before `reveal`: its number is known before anything happens to it."""
        return self._sent(queue, op, _HIDDEN_S, body)

    def reveal(self, sent: Sent) -> None:
        """Make it visible, and nudge the supervisors as an insert would."""
        session = self.session()
        session.execute(f"update pgmq.q_{sent.queue} set vt = clock_timestamp() where msg_id = %s", [sent.msg_id])
        session.execute(f'notify "pgmq.q_{sent.queue}.INSERT"')

    def _sent(self, queue: str, op: str, delay_s: int, body: dict[str, Any]) -> Sent:
        text = json.dumps({"op": op, **body})
        row = self.session().execute("select pgmq.send(%s, %s::jsonb, %s)", [queue, text, delay_s]).fetchone()
        assert row is not None
        sent = Sent(op, queue, int(row[0]))
        self.sent.append(sent)
        return sent

    def row(self, sent: Sent) -> Row | None:
        """Its row now."""
        return read_row(self.session(), sent.queue, sent.msg_id)

    def wait_ended(self, sents: Sequence[Sent], timeout_s: float) -> bool:
        """Wait until none of them is in its queue; False at once where no supervisor runs that could see to it."""
        gone = False

        def over() -> bool:
            nonlocal gone
            gone = self._all_gone(sents)
            return gone or not self.stage.running

        wait_until(over, timeout_s, every_s=_LOOK_AGAIN_S)
        return gone

    def _all_gone(self, sents: Sequence[Sent]) -> bool:
        by_queue: dict[str, list[int]] = {}
        for sent in sents:
            by_queue.setdefault(sent.queue, []).append(sent.msg_id)
        try:
            for queue, ids in by_queue.items():
                found = self.session().execute(f"select 1 from pgmq.q_{queue} where msg_id = any(%s) limit 1", [ids])
                if found.fetchone() is not None:
                    return False
        except psycopg.OperationalError:
            return False
        return True

    def entries(self, op: str) -> list[Entry]:
        """What its handlers have written so far."""
        return [entry for entry in read_ledger(self.ledger)[0] if entry.op == op]

    def has_business(self, op: str) -> bool:
        """Whether its business row is committed."""
        return self.session().execute("select 1 from crash_business where op = %s", [op]).fetchone() is not None

    def archived_read_ct(self, sent: Sent) -> int | None:
        """In which delivery it was acknowledged; None: it was not."""
        found = self.session().execute(
            f"select read_ct from pgmq.a_{sent.queue} where msg_id = %s",
            [sent.msg_id],
        )
        row = found.fetchone()
        return None if row is None else int(row[0])

    def is_archived(self, sent: Sent) -> bool:
        """Whether it is acknowledged."""
        return self.archived_read_ct(sent) is not None

    # --- the end ----------------------------------------------------------------------------------------------------

    def truth(self, exit_code: int | None = 0) -> Truth:
        """Everything, after the supervisor has ended with this code."""
        left = self.stage.wait_for_silence(_SILENCE_S)
        self.wait_sessions_gone(_SILENCE_S)
        truth = read_truth(self.session(), self.ledger, self.sent, self.queues)
        truth.processes = [f"{pid} {title_of(pid)}" for pid in left]
        truth.exit_code = exit_code
        return truth

    def wait_sessions_gone(self, timeout_s: float) -> bool:
        """Wait until nobody else is connected to this database."""

        def alone() -> bool:
            try:
                found = self.session().execute(
                    "select 1 from pg_stat_activity where datname = current_database()"
                    " and application_name <> 'crashtests' and backend_type = 'client backend' limit 1"
                )
                return found.fetchone() is None
            except psycopg.OperationalError:
                return False

        return wait_until(alone, timeout_s, every_s=0.02)


@contextlib.contextmanager
def scene(
    dsn: str,
    queues: Mapping[str, Queue],
    *,
    with_points: bool = True,
    service_dsn: str | None = None,
    app_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Scene]:
    """Set one up; whatever happens, nothing of it lives on. `service_dsn`: another way to the same database."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(private_folder("scene"))
        ledger = folder / "ledger.jsonl"
        given = {"CRASHTESTS_LEDGER": os.fspath(ledger), **(environ or {})}
        points = None
        if with_points:
            points = Rendezvous(folder)
            stack.callback(points.close)
            given |= points.environ()
        places = {} if app_dir is None else {"app_dir": app_dir}
        stage = Stage(folder, service_dsn or dsn, list(queues.values()), environ=given, **places)
        stack.callback(stage.close)
        made = Scene(stage, points, ledger, list(queues), dsn)
        stack.callback(made.close)
        yield made

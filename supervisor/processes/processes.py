"""The hands of the supervisor for processes: commands of the core in, events out, nothing decided here.

    start()  ─▶ subreaper ─▶ guard ─▶ sweep of what an earlier run left
    commands ─▶ Births: Launcher ─▶ ChildProcess ◀─▶ Channel, Output ─▶ events
    pidfd    ─▶ Endings: kill the group ─▶ last words ─▶ sweep ─▶ reap ─▶ ChildDied
    timers   ─▶ Upkeep: orphans that outlived their message, peaks of memory, memory limits

Single-threaded; every method is called on the loop's thread, which must be the main thread, because a child's
PDEATHSIG is tied to the thread that spawned it. No executor raises, and none blocks longer than a spawn.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from shared import syncpoints
from shared.wire.frames import ProtocolError
from supervisor.core.commands import (
    AbandonChild,
    AnswerClaim,
    AnswerCommit,
    Dispatch,
    GrantPermit,
    GuardLeases,
    KillChild,
    SendExit,
    SendStop,
    SendTerm,
    StartChild,
)
from supervisor.core.events import Event, ProtocolBroken, SpawnFailed
from supervisor.core.types import ChildId
from supervisor.processes import frames_out, marks, procfs
from supervisor.processes.births import Births, OnLog
from supervisor.processes.endings import Endings, OnSwept
from supervisor.processes.guard import Guard
from supervisor.processes.launcher import Launcher, PopenLauncher
from supervisor.processes.leftovers import sweep_left_overs
from supervisor.processes.oom import OomWatch
from supervisor.processes.output import OnOutput
from supervisor.processes.process import ChildProcess
from supervisor.processes.spec import ChildSpec
from supervisor.processes.stamps import Stamps
from supervisor.processes.starts import Starts
from supervisor.processes.sweeper import Sweeper, adopt_orphans
from supervisor.processes.table import Table
from supervisor.processes.upkeep import Upkeep

_CLOSE_LIMIT_S: Final = 5.0
_log = logging.getLogger(__name__)


class ChildStatus(NamedTuple):
    """A living child, for displays."""

    pid: int
    rss_bytes: int
    cpu_s: float
    uptime_s: float


class Processes:
    """All children of a supervisor. `post` must only enqueue: it is called from within executors and callbacks."""

    def __init__(
        self,
        *,
        queues: Mapping[str, ChildSpec],
        post: Callable[[Event], None],
        clock: Callable[[], float],
        on_output: OnOutput,
        on_log: OnLog,
        on_swept: OnSwept,
        supervisor_name: str,
        launcher: Launcher | None = None,
        oom: OomWatch | None = None,
    ) -> None:
        """Needs a running loop; nothing happens before `start`."""
        self._post = post
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._owner = marks.owner_of_this_process(supervisor_name)
        self._table = Table()
        self._guard = Guard(owner=self._owner, loop=self._loop)
        self._protected: set[int] = set()
        stamps = Stamps()
        self._sweeper = Sweeper(
            owner=self._owner,
            clock=clock,
            leader_of=self._table.leader_of,
            is_own=lambda pid: pid == self._guard.pid or pid in self._protected,
            child_oom_score_adj=(spec.oom_score_adj for spec in queues.values()),
            stamp_of=stamps.read,
        )
        oom = oom if oom is not None else OomWatch(clock=clock)
        self._endings = Endings(
            table=self._table,
            sweeper=self._sweeper,
            guard=self._guard,
            oom=oom,
            loop=self._loop,
            post=post,
            on_swept=on_swept,
        )
        self._upkeep = Upkeep(
            table=self._table,
            sweeper=self._sweeper,
            guard=self._guard,
            oom=oom,
            loop=self._loop,
            post=post,
            on_swept=on_swept,
        )
        self._births = Births(
            owner=self._owner,
            queues=queues,
            launcher=launcher if launcher is not None else PopenLauncher(),
            table=self._table,
            sweeper=self._sweeper,
            stamps=stamps,
            guard=self._guard,
            loop=self._loop,
            clock=clock,
            post=post,
            on_output=on_output,
            on_log=on_log,
            on_end=self._endings.on_readable,
        )
        self._starts = Starts(self._table, self._loop)
        self._closing = False

    async def start(self) -> None:
        """Guard first, then the sweep of left-overs. Raises `OSError` or `TimeoutError` when there is no guard."""
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the kernel would reap for us, unseen
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        try:
            await self._guard.start()
        except BaseException:
            await self._guard.close()
            raise
        await sweep_left_overs()
        self._upkeep.start()

    async def close(self) -> None:
        """Kill what is left, wait for it (bounded), and end the guard last."""
        self._closing = True
        for child in list(self._table):
            child.kill(with_stack=False, on_kill=self._before_kill)
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await self._endings.wait_until_none()
        except TimeoutError:
            _log.error("%d children cannot be killed", len(self._table))
        self._upkeep.close()
        self._starts.close()
        await self._guard.close()

    def protect(self, pid: int) -> None:
        """A process that another part of the supervisor started: neither swept nor reaped here."""
        self._protected.add(pid)

    def unprotect(self, pid: int) -> None:
        """That part has waited for it."""
        self._protected.discard(pid)

    def status(self, child: ChildId) -> ChildStatus | None:
        """Figures of a living child, read now. None when it is gone."""
        process = self._table.get(child)
        stat = procfs.read_stat(process.pid) if process is not None else None
        if process is None or stat is None:
            return None
        uptime_s = self._clock() - process.spawned_at
        return ChildStatus(process.pid, procfs.read_rss_bytes(process.pid), stat.cpu_s, uptime_s)

    # --- executors ----------------------------------------------------------------------------------------------

    def start_child(self, command: StartChild) -> None:
        """Spawn; `ChildSpawned` or `SpawnFailed` follows at once."""
        if self._closing:
            self._post(SpawnFailed(command.child, "closing"))
        else:
            self._births.start(command)

    def dispatch(self, command: Dispatch) -> None:
        """Hand a message over. A body over the limit breaks the protocol before anything is sent."""
        process = self._table.get(command.child)
        if process is None or process.ended:
            return
        try:
            frame = frames_out.dispatch_frame(command)
        except ProtocolError as error:
            self._post(ProtocolBroken(command.child, str(error)))
            return
        ids = {"queue": process.queue, "msg_id": command.msg_id}
        syncpoints.hit("parent.dispatch.before", ids)
        self._guard.set_deadline(process.guard_slot, command.lease_deadline)
        process.begin(command.claim_id)
        process.channel.talk.dispatched(command.claim_id)
        process.channel.send(frame)
        self._starts.expect()
        syncpoints.hit("parent.dispatch.after", ids)

    def guard_leases(self, command: GuardLeases) -> None:
        """New deadlines; of running messages only, so that an idle child has none."""
        for child, deadline in command.deadlines:
            process = self._table.get(child)
            if process is not None:
                self._guard.set_deadline(process.guard_slot, deadline if process.busy else 0.0)

    def send_stop(self, command: SendStop) -> None:
        """The stop frame, for the message in hand only."""
        process = self._table.get(command.child)
        if process is not None and process.channel.talk.claim_id == command.claim_id:
            process.channel.send(frames_out.stop_frame(command))

    def send_term(self, command: SendTerm) -> None:
        """SIGTERM to the leader."""
        process = self._table.get(command.child)
        if process is not None and not process.ended:
            process.send_signal(signal.SIGTERM)

    def send_exit(self, command: SendExit) -> None:
        """Ask for an end in order."""
        process = self._table.get(command.child)
        if process is not None:
            process.channel.ending = True
            process.channel.send(frames_out.exit_frame())

    def kill_child(self, command: KillChild) -> None:
        """SIGKILL leader, group and, at its end, all that it started."""
        process = self._table.get(command.child)
        if process is not None:
            process.kill(with_stack=command.with_stack, on_kill=self._before_kill)

    def abandon_child(self, command: AbandonChild) -> None:
        """Killed and not dead. It stays watched: should it die, `ChildDied` follows."""
        process = self._table.get(command.child)
        if process is not None:
            _log.error("pid %d of queue %s was killed and does not die", process.pid, process.queue)

    def grant_permit(self, command: GrantPermit) -> None:
        """Transactional: one claim."""
        process = self._table.get(command.child)
        if process is None or process.ended:
            return
        process.begin(command.claim_id)
        process.channel.talk.permitted(command.claim_id)
        process.channel.send(frames_out.permit_frame(command))

    def answer_claim(self, command: AnswerClaim) -> None:
        """Transactional: whether the handler may begin."""
        process = self._table.get(command.child)
        if process is not None and process.channel.talk.claim_id == command.claim_id:
            process.channel.send(frames_out.claim_frame(command))

    def answer_commit(self, command: AnswerCommit) -> None:
        """Transactional: the verdict."""
        process = self._table.get(command.child)
        if process is not None and process.channel.talk.claim_id == command.claim_id:
            syncpoints.hit("parent.verdict.before", {"queue": process.queue, "claim": command.claim_id})
            process.channel.talk.answered()
            process.channel.send(frames_out.verdict_frame(command))
            syncpoints.hit("parent.verdict.after", {"queue": process.queue, "claim": command.claim_id})

    def _before_kill(self, process: ChildProcess) -> None:
        """Remember its tree: what cleared its environment could not be told from others afterwards."""
        self._sweeper.remember_tree(process.child, process.pid)

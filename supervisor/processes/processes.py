"""The hands of the supervisor for processes: commands of the core in, events out, nothing decided here.

    start()  ─▶ subreaper ─▶ guard ─▶ sweep of what an earlier run left
    commands ─▶ Launcher ─▶ ChildProcess ◀─▶ Channel, Output ─▶ events
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
from shared.wire.frames import Kind, ProtocolError, encode
from supervisor.core.commands import (
    AbandonChild,
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
from supervisor.core.events import ChildSpawned, Event, ProtocolBroken, SpawnFailed
from supervisor.core.types import ChildId, ClaimId
from supervisor.processes import frames_out, marks, procfs
from supervisor.processes.channel import Channel
from supervisor.processes.endings import Endings, OnSwept
from supervisor.processes.guard import Guard
from supervisor.processes.launcher import Launched, Launcher, PopenLauncher
from supervisor.processes.oom import OomWatch
from supervisor.processes.output import OnOutput, Output
from supervisor.processes.process import ChildProcess
from supervisor.processes.spec import ChildSpec, hello
from supervisor.processes.sweeper import Sweeper, adopt_orphans, kill_left_overs_of_the_dead
from supervisor.processes.table import Table
from supervisor.processes.upkeep import Upkeep

_START_SWEEP_ROUNDS: Final = 100
_START_SWEEP_ROUND_S: Final = 0.01
_CLOSE_LIMIT_S: Final = 5.0
_log = logging.getLogger(__name__)

OnLog = Callable[[ChildId, ClaimId | None, str, str], None]


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
        self._queues = dict(queues)
        self._post = post
        self._clock = clock
        self._on_output = on_output
        self._on_log = on_log
        self._loop = asyncio.get_running_loop()
        self._owner = marks.owner_of_this_process(supervisor_name)
        self._launcher: Launcher = launcher if launcher is not None else PopenLauncher()
        self._table = Table()
        self._guard = Guard(owner=self._owner, loop=self._loop)
        self._protected: set[int] = set()
        self._sweeper = Sweeper(
            owner=self._owner,
            clock=clock,
            leader_of=self._table.leader_of,
            is_own=lambda pid: pid == self._guard.pid or pid in self._protected,
            child_oom_score_adj=(spec.oom_score_adj for spec in self._queues.values()),
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
            table=self._table, sweeper=self._sweeper, oom=oom, loop=self._loop, post=post, on_swept=on_swept
        )
        self._closing = False

    async def start(self) -> None:
        """Guard first, then the sweep of left-overs. Raises `OSError` or `TimeoutError` when there is no guard."""
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the kernel would reap for us, unseen
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        await self._guard.start()
        namespace = procfs.pid_namespace()
        killed = 0
        for _ in range(_START_SWEEP_ROUNDS):
            found = kill_left_overs_of_the_dead(namespace)
            if not found:
                break
            killed += found
            await asyncio.sleep(_START_SWEEP_ROUND_S)
        if killed:
            _log.warning("killed %d processes that a dead supervisor had left", killed)
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
        spec = self._queues.get(command.queue)
        if spec is None or self._closing:
            self._post(SpawnFailed(command.child, "closing" if spec else f"unknown queue {command.queue}"))
            return
        mark = marks.make(self._owner, command.child)
        try:
            launched = self._launcher.launch(queue=command.queue, mark=mark, capture=spec.output == "capture")
        except OSError as error:
            self._post(SpawnFailed(command.child, f"{error.strerror or error} ({type(error).__name__})"))
            return
        process = self._adopt(command, spec, launched)
        self._post(ChildSpawned(command.child, process.pid))
        process.channel.send(encode(Kind.HELLO, 0, hello(spec, command, metrics_index=process.metrics_index)))

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
        syncpoints.hit("parent.dispatch.before", {"msg_id": command.msg_id})
        self._guard.set_deadline(process.guard_slot, command.lease_deadline)
        process.begin(command.claim_id)
        process.channel.talk.dispatched(command.claim_id)
        process.channel.send(frame)
        syncpoints.hit("parent.dispatch.after", {"msg_id": command.msg_id})

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

    def answer_commit(self, command: AnswerCommit) -> None:
        """Transactional: the verdict."""
        process = self._table.get(command.child)
        if process is not None and process.channel.talk.claim_id == command.claim_id:
            syncpoints.hit("parent.verdict.before", {"claim": command.claim_id})
            process.channel.talk.answered()
            process.channel.send(frames_out.verdict_frame(command))
            syncpoints.hit("parent.verdict.after", {"claim": command.claim_id})

    # --- inside -------------------------------------------------------------------------------------------------

    def _adopt(self, command: StartChild, spec: ChildSpec, launched: Launched) -> ChildProcess:
        """Connect a new process with everything that watches it."""
        child = command.child
        output: Output | None = None
        if launched.output_fd is not None:
            output = Output(
                child=child, fd=launched.output_fd, loop=self._loop, on_output=self._on_output, clock=self._clock
            )
        channel = Channel(
            child=child,
            sock=launched.sock,
            loop=self._loop,
            post=self._post,
            on_log=self._on_log,
            before_result=lambda: self._before_result(process),
            on_ready=lambda: self._on_ready(process),
        )
        process = ChildProcess(
            command=command,
            spec=spec,
            launched=launched,
            channel=channel,
            output=output,
            loop=self._loop,
            clock=self._clock,
        )
        self._table.add(process)
        process.guard_slot = self._guard.register(child=child, pid=process.pid, pidfd=process.pidfd)
        self._loop.add_reader(process.pidfd, self._endings.on_readable, process)
        return process

    def _before_result(self, process: ChildProcess) -> None:
        self._guard.set_deadline(process.guard_slot, 0.0)
        process.end()

    def _on_ready(self, process: ChildProcess) -> None:
        process.ready_at = self._clock()
        process.measure_peak()
        process.module_processes = self._sweeper.started_by_module(process.child, process.pid, process.spawned_at)

    def _before_kill(self, process: ChildProcess) -> None:
        """Remember its tree: what cleared its environment could not be told from others afterwards."""
        self._sweeper.remember_tree(process.child, process.pid)

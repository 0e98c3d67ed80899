"""What happens when a child is started: spawn, connect it with everything that watches it, HELLO."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from shared.wire.frames import Kind, encode
from supervisor.core.commands import StartChild
from supervisor.core.events import ChildSpawned, Event, SpawnFailed
from supervisor.core.types import ChildId, ClaimId
from supervisor.processes import marks, procfs
from supervisor.processes.channel import Channel
from supervisor.processes.guard import Guard
from supervisor.processes.launcher import Launched, Launcher
from supervisor.processes.output import OnOutput, Output
from supervisor.processes.process import ChildProcess
from supervisor.processes.spec import ChildSpec, hello
from supervisor.processes.stack import StackFile
from supervisor.processes.stamps import Stamps
from supervisor.processes.sweeper import Sweeper
from supervisor.processes.table import Table

OnLog = Callable[[ChildId, ClaimId | None, str, str], None]


class Births:
    """Brings children into the table. `on_end` is called when a pidfd is readable."""

    def __init__(
        self,
        *,
        owner: str,
        queues: Mapping[str, ChildSpec],
        launcher: Launcher,
        table: Table,
        sweeper: Sweeper,
        stamps: Stamps,
        guard: Guard,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[Event], None],
        on_output: OnOutput,
        on_log: OnLog,
        on_end: Callable[[ChildProcess], None],
    ) -> None:
        """`owner` begins the mark of every child."""
        self._owner = owner
        self._queues = dict(queues)
        self._launcher = launcher
        self._table = table
        self._sweeper = sweeper
        self._stamps = stamps
        self._guard = guard
        self._loop = loop
        self._clock = clock
        self._post = post
        self._on_output = on_output
        self._on_log = on_log
        self._on_end = on_end

    def start(self, command: StartChild) -> None:
        """Spawn and say HELLO; `ChildSpawned` or `SpawnFailed` is posted at once."""
        spec = self._queues.get(command.queue)
        if spec is None:
            self._post(SpawnFailed(command.child, f"unknown queue {command.queue}"))
            return
        mark = marks.make(self._owner, command.child)
        try:
            launched = self._launcher.launch(queue=command.queue, mark=mark, capture=spec.output == "capture")
        except OSError as error:
            self._post(SpawnFailed(command.child, f"{error.strerror or error} ({type(error).__name__})"))
            return
        # Now, not when it has booted: the kernel may look for a victim at any moment, and must not find us.
        procfs.raise_oom_score_adj(launched.pid, spec.oom_score_adj)
        self._stamps.put(launched.pid, command.child)
        process = self._connect(command, spec, launched)
        self._post(ChildSpawned(command.child, process.pid))
        process.channel.send(encode(Kind.HELLO, 0, hello(spec, command, metrics_index=process.metrics_index)))

    def _connect(self, command: StartChild, spec: ChildSpec, launched: Launched) -> ChildProcess:
        child = command.child
        output: Output | None = None
        if launched.output_fd is not None:
            output = Output(
                child=child, fd=launched.output_fd, loop=self._loop, on_output=self._on_output, clock=self._clock
            )
        stack = StackFile(launched.stack_fd)
        channel = Channel(
            child=child,
            from_child_fd=launched.from_child_fd,
            to_child_fd=launched.to_child_fd,
            begun=stack.begun,
            loop=self._loop,
            post=self._post,
            on_log=self._on_log,
            before_result=lambda: self._before_result(process),
            on_ready=lambda: self._on_ready(process),
            on_swept=lambda count: self._sweeper.killed.update({int(child): count}),
        )
        process = ChildProcess(
            command=command,
            spec=spec,
            launched=launched,
            channel=channel,
            output=output,
            stack=stack,
            loop=self._loop,
            clock=self._clock,
        )
        self._table.add(process)
        process.guard_slot = self._guard.register(child=child, pid=process.pid, pidfd=process.pidfd)
        self._loop.add_reader(process.pidfd, self._on_end, process)
        return process

    def _before_result(self, process: ChildProcess) -> None:
        self._guard.set_deadline(process.guard_slot, 0.0)
        process.end()

    def _on_ready(self, process: ChildProcess) -> None:
        process.ready_at = self._clock()
        process.measure_peak()
        process.module_processes = self._sweeper.started_by_module(process.child, process.pid, process.spawned_at)

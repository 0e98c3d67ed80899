"""The composition root: builds the parts, connects them, runs until `Exit`, and takes them down in reverse order.

    telemetry ─ guard and children ─ database ─ core under the driver ─ control socket ─ HTTP

No policy here: what to do is in `supervisor.core`, how to do it in the parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import secrets
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from shared import syncpoints
from shared.clock import boottime
from shared.errors import ConfigurationError, ConnectionLost
from supervisor.actions import SupervisorActions
from supervisor.config import DEFAULT_FILE, Config
from supervisor.control.binding import bind_control_socket
from supervisor.control.places import UnsafeFolderError, usable_folder
from supervisor.control.server import ControlServer
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.core import Core
from supervisor.core.settings import CoreSettings
from supervisor.core.types import Mode
from supervisor.database.database import Database
from supervisor.driver import Driver
from supervisor.preparing import Redriven, prepare_queues, redrive_letters
from supervisor.processes.processes import Processes
from supervisor.processes.spec import ChildSpec
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.facts import ProcessesSwept
from supervisor.telemetry.telemetry import Telemetry, TelemetryOptions
from supervisor.web.server import WebServer

_SECOND_SIGNAL_S: Final = 1.0  # two within it are one: a terminal and a wrapper may both send
_STANDBY_LOOK_S: Final = 1.0


async def run_service(config: Config) -> int:
    """Run one supervisor; gives its exit code. Raises `SupervisorError` when it cannot start."""
    host = socket.gethostname()
    settings = config.to_core_settings(
        host=host,
        supervisor=f"{host}-{os.getpid()}-{secrets.token_hex(3)}",
        version=metadata.version("pgmq-supervisor"),
    )
    return await _Service(config, settings).run()


class _Service:
    """One supervisor's life. Everything runs on the loop's thread, which is the main thread."""

    def __init__(self, config: Config, settings: CoreSettings) -> None:
        self._config = config
        self._settings = settings
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._failure: BaseException | None = None
        self._first_signal_at: float | None = None
        self._stopping_early = asyncio.Event()
        self._closing = threading.Event()  # for work on other threads
        self._started = False

    async def run(self) -> int:
        """Until `Exit`, or until something of ours fails: then that is raised, after everything is closed."""
        syncpoints.switch_on_if_asked("parent")
        async with contextlib.AsyncExitStack() as stack:
            await self._build(stack)
            if not await self._prepared():
                return 0
            self._started = True
            # Work makes few cycles and many values: looking for garbage as often as by default costs some percent.
            gc.freeze()
            gc.set_threshold(50_000, 20, 20)
            self._driver.post(e.Started())
            code = await self._exit
            self._closing.set()
            self._telemetry.note("stopped", "supervisor stopped", exit_code=code)
        if self._failure is not None:
            raise self._failure
        return code

    # --- building ---------------------------------------------------------------------------------------------------

    async def _build(self, stack: contextlib.AsyncExitStack) -> None:
        config, settings = self._config, self._settings
        self._telemetry = telemetry = Telemetry(
            settings,
            TelemetryOptions(
                log_format=config.log.format,
                log_level=config.log.level,
                metrics_base=_runtime_folder(),
                user_sink=config.events.sink,
                app_dir=str(config.app_dir),
                acquire_s=config.database.acquire_timeout,
                connect_s=config.database.connect_timeout,
            ),
        )
        stack.push_async_callback(telemetry.close)
        self._core = core = Core(settings, random.Random().random)  # noqa: S311 - jitter, not secrets
        self._processes = processes = Processes(
            queues={name: self._spec(name) for name in config.queues},
            post=self._post,
            clock=boottime,
            on_output=telemetry.child_output,
            on_log=telemetry.child_log,
            on_swept=lambda queue, count: telemetry.happened(ProcessesSwept(queue, count)),
            supervisor_name=settings.supervisor,
        )
        self._database = database = Database(
            config.dsn,
            config.database.listen_dsn,
            settings.queues,
            post=self._post,
            tell=telemetry.happened,
            clock=boottime,
            pool_size=config.database.pool_size,
            connect_timeout_s=config.database.connect_timeout,
            acquire_timeout_s=config.database.acquire_timeout,
            statement_timeout_s=config.database.statement_timeout,
        )
        self._driver = Driver(
            core,
            clock=boottime,
            executors=self._executors(),
            tell=telemetry.happened,
            failed=self._failed,
        )
        stack.callback(self._driver.close)
        telemetry.attach(
            snapshot=lambda: core.snapshot(boottime()), heartbeat=lambda: self._driver.beat_at, sample=self._sample
        )
        telemetry.start()
        self._take_signals()
        await processes.start()
        stack.push_async_callback(processes.close)
        await self._open_doors(stack)
        await database.start()
        stack.push_async_callback(database.close)
        stack.push_async_callback(telemetry.stop_sampling)

    def _spec(self, name: str) -> ChildSpec:
        """What the children of a queue are told."""
        queue = self._config.queues[name]
        transactional = queue.mode is Mode.TRANSACTIONAL
        return ChildSpec(
            handler=queue.handler,
            app_dir=str(self._config.app_dir),
            mode=queue.mode,
            dead_letter_queue=queue.dead_letter_queue_of(name),
            output=str(queue.output),
            memory_limit_bytes=queue.memory_limit,
            dsn=self._config.dsn if transactional else None,
            statement_timeout_ms=round(self._config.database.statement_timeout * 1000) if transactional else None,
            visibility_timeout_ms=round(queue.visibility_timeout * 1000) if transactional else None,
            max_attempts=queue.max_attempts if transactional else None,
            max_deaths=queue.max_deaths if transactional else None,
            metrics_dir=self._telemetry.metrics_folder,
        )

    def _executors(self) -> dict[type[c.Command], Callable[[Any], None]]:
        """Who carries out which command."""
        processes, database = self._processes, self._database
        return {
            c.Claim: database.claim,
            c.FetchBody: database.fetch_body,
            c.Renew: database.renew,
            c.Settle: database.settle,
            c.Reckon: database.reckon,
            c.TerminateBackend: database.terminate_backend,
            c.StartChild: processes.start_child,
            c.Dispatch: self._dispatch,
            c.GuardLeases: processes.guard_leases,
            c.SendStop: processes.send_stop,
            c.SendTerm: processes.send_term,
            c.SendExit: processes.send_exit,
            c.KillChild: processes.kill_child,
            c.AbandonChild: processes.abandon_child,
            c.GrantPermit: processes.grant_permit,
            c.AnswerClaim: processes.answer_claim,
            c.AnswerCommit: processes.answer_commit,
            c.Exit: self._ended,
        }

    async def _open_doors(self, stack: contextlib.AsyncExitStack) -> None:
        """The control socket, always; HTTP, where it is configured."""
        config, telemetry = self._config, self._telemetry
        actions = SupervisorActions(
            core=self._core,
            post=self._post,
            telemetry=telemetry,
            administration=self._database,
            redrive=self._redrive,
            queues=list(config.queues),
            name=self._settings.supervisor,
        )
        bound = bind_control_socket(
            configured=config.control.socket,
            config_path=config.source or Path.cwd() / DEFAULT_FILE,
            environ=os.environ,
        )
        control = ControlServer(
            bound,
            actions,
            on_refused=lambda uid: telemetry.note("control", f"user {uid} was turned away", level="warning"),
        )
        control.start()
        stack.push_async_callback(control.close)
        telemetry.note("control", "control socket is open", socket=str(bound.path))
        if config.http is None:
            return
        web = WebServer(
            actions,
            host=config.http.host,
            port=config.http.port,
            token=config.http.token,
            on_error=lambda error: telemetry.note("http", f"a request failed: {error!r}", level="error"),
        )
        await web.start()
        stack.push_async_callback(web.close)
        print(f"http: listening on http://{config.http.host}:{web.port}", flush=True)  # port 0: this is how it is found
        telemetry.note("http", f"listening on http://{config.http.host}:{web.port}", port=web.port)

    # --- start ------------------------------------------------------------------------------------------------------

    async def _prepared(self) -> bool:
        """Queues and dead-letter queues stand; False when we were told to stop before that."""
        stopping = asyncio.ensure_future(self._stopping_early.wait())
        was_standby = self._database.standby
        if was_standby:  # said by the database when it was found; begins by itself after promotion
            self._telemetry.waits_for = "the database is a hot standby, which is to be promoted first"
        try:
            while True:
                while self._database.standby:
                    await asyncio.wait({stopping}, timeout=_STANDBY_LOOK_S)
                    if stopping.done():
                        return False
                    await self._database.ping()
                try:
                    # The database's keeper says what is not notified.
                    await asyncio.to_thread(prepare_queues, self._config)
                except ConnectionLost:
                    if not was_standby:
                        raise
                    # Who waited for a promotion does not give up when the new primary is restarted.
                    await asyncio.wait({stopping}, timeout=_STANDBY_LOOK_S)
                else:
                    break
                if stopping.done():
                    return False
            return not stopping.done()
        finally:
            self._telemetry.waits_for = None
            stopping.cancel()

    # --- running ----------------------------------------------------------------------------------------------------

    def _post(self, event: e.Event) -> None:
        if type(event) is e.TransactionClaimed:
            self._telemetry.handed(event.child, event.claim_id, event.msg_id, None)
        self._driver.post(event)

    def _dispatch(self, command: c.Dispatch) -> None:
        # Labels for what the handler prints must stand before it can print.
        self._telemetry.handed(command.child, command.claim_id, command.msg_id, command.attempt)
        self._processes.dispatch(command)

    def _ended(self, command: c.Exit) -> None:
        if not self._exit.done():
            self._exit.set_result(command.code)

    def _failed(self, error: BaseException) -> None:
        """A core or an executor that failed is a defect of ours: nothing goes on, leases bring the work back."""
        self._failure = error
        text = "".join(traceback.format_exception(error))
        self._telemetry.note("internal_error", f"internal error: {error!r}", level="error", traceback=text)
        if not self._exit.done():
            self._exit.set_result(1)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._told_to_stop, signum)
        loop.add_signal_handler(signal.SIGHUP, self._told_to_reload)
        loop.add_signal_handler(signal.SIGUSR1, self._telemetry.log_status)

    def _told_to_stop(self, signum: int) -> None:
        name = signal.Signals(signum).name
        self._stopping_early.set()
        if not self._started:
            return
        now = boottime()
        if self._first_signal_at is None:
            self._first_signal_at = now
            self._telemetry.note("signal", f"{name}: draining; another one after {_SECOND_SIGNAL_S:g} s kills")
            self._post(e.ShutdownRequested())
        elif now - self._first_signal_at > _SECOND_SIGNAL_S:
            self._telemetry.note("signal", f"{name} again: killing children now", level="warning")
            self._post(e.EscalationRequested())

    def _told_to_reload(self) -> None:
        if self._started:
            self._telemetry.note("signal", "SIGHUP: reloading handlers")
            self._post(e.ReloadRequested())

    async def _sample(self) -> dict[str, QueueCounts]:
        """Depths of the queues, for gauges and displays."""
        found: dict[str, QueueCounts] = {}
        for name in self._config.queues:
            counts = await self._database.counts(name)
            if counts is not None:
                found[name] = QueueCounts(
                    visible=counts.visible, oldest_visible_s=counts.oldest_visible_s, at_limit=counts.at_limit
                )
        return found

    async def _redrive(self, queue: str, msg_ids: Sequence[int] | None, rate: float | None) -> Redriven:
        return await asyncio.to_thread(redrive_letters, self._config, queue, msg_ids, rate, self._closing)


def _runtime_folder() -> Path | None:
    """A private folder for the files of children's metrics; None: they are not collected."""
    try:
        return usable_folder(os.environ)
    except (OSError, UnsafeFolderError, ConfigurationError):
        return None

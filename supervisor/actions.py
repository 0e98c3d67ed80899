"""What can be asked of a running supervisor: the answers behind the control socket, HTTP and signals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from shared.errors import SupervisorError
from supervisor.control.actions import ActionError, Refusal, Result
from supervisor.core.core import Core
from supervisor.core.events import CancelRequested, Event, ShutdownRequested
from supervisor.core.types import QueueName
from supervisor.preparing import Redriven
from supervisor.telemetry.telemetry import Telemetry


class Administration(Protocol):
    """What the actions need of the database."""

    async def pause(self, queue: QueueName, by: str) -> bool:
        """Pause for every supervisor; False: only here. Posts `PauseChanged`."""

    async def resume(self, queue: QueueName) -> bool:
        """Resume; False: the row could not be removed. Posts `PauseChanged`."""


Redrive = Callable[[str, Sequence[int] | None, float | None], Awaitable[Redriven]]


class SupervisorActions:
    """Implements `supervisor.control.actions.Actions`."""

    def __init__(
        self,
        *,
        core: Core,
        post: Callable[[Event], None],
        telemetry: Telemetry,
        administration: Administration,
        redrive: Redrive,
        queues: Sequence[str],
        name: str,
    ) -> None:
        self._core = core
        self._post = post
        self._telemetry = telemetry
        self._administration = administration
        self._redrive = redrive
        self._queues = frozenset(queues)
        self._name = name

    async def pause(self, queue: str) -> Result:
        """Pause for every supervisor; where the row cannot be written, for this one only, and say so."""
        self._known(queue)
        shared = await self._administration.pause(QueueName(queue), self._name)
        note = None if shared else "only in this supervisor: the table of pauses cannot be written; see `init`"
        return {"queue": queue, "paused": True, "persisted": shared, "note": note}

    async def resume(self, queue: str) -> Result:
        """Undo `pause`."""
        self._known(queue)
        shared = await self._administration.resume(QueueName(queue))
        note = None if shared else "the row in the table of pauses could not be removed: what it pauses stays paused"
        return {"queue": queue, "paused": False, "persisted": shared, "note": note}

    async def cancel(self, queue: str, msg_id: int) -> Result:
        """Cancel a message that this supervisor holds."""
        self._known(queue)
        if not self._core.holds(queue, msg_id):
            raise ActionError(
                Refusal.UNKNOWN, f"this supervisor has no message {msg_id} of queue {queue} in hand: nothing to cancel"
            )
        self._post(CancelRequested(QueueName(queue), msg_id))
        return {"queue": queue, "msg_id": msg_id, "cancelling": True}

    async def redrive(self, queue: str, msg_ids: Sequence[int] | None, rate: float | None) -> Result:
        """Move dead letters back to their source; what does not fit into one answer is left, and the answer says so."""
        self._known(queue)
        try:
            done = await self._redrive(queue, msg_ids, rate)
        except SupervisorError as error:
            raise ActionError(Refusal.FAILED, error.message) from error
        note = f"more left: call again{f' ({done.error})' if done.error else ''}" if done.more else None
        return {
            "queue": queue,
            "redriven": done.moved,
            "skipped": done.skipped,
            "failed": done.failed,
            "more": done.more,
            "note": note,
        }

    async def drain(self) -> Result:
        """As TERM does."""
        self._post(ShutdownRequested())
        return {"draining": True}

    def status(self) -> Mapping[str, object]:
        """The status document."""
        return self._telemetry.status()

    async def metrics(self, *, openmetrics: bool) -> tuple[bytes, str]:
        """The exposition and its content type."""
        exposition = await self._telemetry.metrics(openmetrics=openmetrics)
        return exposition.body, exposition.content_type

    def not_live(self) -> Sequence[str]:
        """Why the loop makes no progress."""
        return self._telemetry.not_live()

    def not_ready(self) -> Mapping[str, str]:
        """Why queues are not ready."""
        return self._telemetry.not_ready()

    def _known(self, queue: str) -> None:
        if queue not in self._queues:
            names = ", ".join(sorted(self._queues))
            raise ActionError(Refusal.UNKNOWN, f"this supervisor has no queue {queue}; it has {names}")

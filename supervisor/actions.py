"""What can be asked of a running supervisor: the answers behind the control socket, HTTP and signals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from shared.errors import SupervisorError
from supervisor.control.actions import ActionError, Refusal, Result
from supervisor.core.core import Core
from supervisor.core.events import CancelRequested, Event, PauseChanged, ShutdownRequested
from supervisor.core.types import QueueName
from supervisor.telemetry.facts import PauseIsLocal
from supervisor.telemetry.telemetry import Telemetry


class Administration(Protocol):
    """What the actions need of the database."""

    async def set_paused(self, queue: str, paused: bool) -> None:  # noqa: FBT001 - a state, not a flag
        """Write or remove the row that all supervisors of the queue see."""

    async def redrive(self, queue: str, msg_ids: Sequence[int] | None, rate: float | None) -> int:
        """Move dead letters back; how many."""


class SupervisorActions:
    """Implements `supervisor.control.actions.Actions`."""

    def __init__(
        self,
        *,
        core: Core,
        post: Callable[[Event], None],
        telemetry: Telemetry,
        administration: Administration,
        queues: Sequence[str],
    ) -> None:
        self._core = core
        self._post = post
        self._telemetry = telemetry
        self._administration = administration
        self._queues = frozenset(queues)

    async def pause(self, queue: str) -> Result:
        """Pause for every supervisor; where the row cannot be written, for this one only, and say so."""
        return await self._set_paused(queue, paused=True)

    async def resume(self, queue: str) -> Result:
        """Undo `pause`."""
        return await self._set_paused(queue, paused=False)

    async def _set_paused(self, queue: str, *, paused: bool) -> Result:
        self._known(queue)
        note: str | None = None
        try:
            await self._administration.set_paused(queue, paused)
        except SupervisorError as error:
            note = f"only in this supervisor: {error.message}"
            self._telemetry.happened(PauseIsLocal(queue, error.message))
        self._post(PauseChanged(QueueName(queue), paused, local=note is not None or not paused))
        return {"queue": queue, "paused": paused, "persisted": note is None, "note": note}

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
        """Move dead letters back to their source."""
        self._known(queue)
        return {"queue": queue, "redriven": await self._tried(self._administration.redrive(queue, msg_ids, rate))}

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

    async def _tried(self, work: Awaitable[int]) -> int:
        try:
            return await work
        except SupervisorError as error:
            raise ActionError(Refusal.FAILED, error.message) from error

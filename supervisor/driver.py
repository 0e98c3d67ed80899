"""The driver: feeds events to the core and carries its commands out. The only place where the core meets a clock.

shell callbacks ── post(event) ──▶ queue ──▶ core.handle(event, now) ─┬─▶ executors[type(command)](command)
                                                                      └─▶ tell(happening)
│
timer ◀── core.next_deadline()
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from supervisor.core.commands import Command
from supervisor.core.core import Core
from supervisor.core.events import Event, StoodStill, TimePassed
from supervisor.core.happenings import Happening

_LONGEST_SLEEP_S: Final = 1.0  # the loop's timers do not count suspend: look at the real clock at least this often
_STOOD_STILL_S: Final = 2.0  # not heard of for so long although the timer rings each second
_EVENTS_A_TURN: Final = 2000  # then other callbacks of the loop get their turn


class Driver:
    """`post` may be called from anywhere on the loop's thread, also from within executors; it only enqueues.

    `failed` is called once with an exception of the core or of an executor: a core that failed must not go on.
    """

    def __init__(
        self,
        core: Core,
        *,
        clock: Callable[[], float],
        executors: Mapping[type[Command], Callable[[Any], None]],
        tell: Callable[[Happening], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._clock = clock
        assert set(executors) == set(get_args(Command))  # what is no command is told
        self._executors: dict[type, Callable[[Any], None]] = dict(executors)
        self._tell = tell
        self._failed = failed
        self._events: deque[Event] = deque()
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._dead = False
        self.beat_at = clock()

    def post(self, event: Event) -> None:
        """Enqueue; handled before the loop waits again."""
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def close(self) -> None:
        """Nothing is handled any more."""
        self._dead = True
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._scheduled = False
        if self._dead:
            return
        try:
            self._handle_all()
        except Exception as error:  # noqa: BLE001 - the boundary of the driver: said, and the service ends
            self.close()
            self._failed(error)

    def _handle_all(self) -> None:
        events, handle, clock = self._events, self._core.handle, self._clock
        find, tell = self._executors.get, self._tell
        now = self.beat_at
        for _ in range(_EVENTS_A_TURN):
            if not events:
                break
            before, now = now, clock()
            if now - before > _STOOD_STILL_S:  # also between two events: a process can be stopped anywhere
                events.appendleft(StoodStill(now - before))
            for said in handle(events.popleft(), now):
                find(type(said), tell)(said)
        self.beat_at = now
        if events:
            self._scheduled = True
            self._loop.call_soon(self._run)
        else:
            self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        """One timer, moved only when it must ring earlier than it is set to."""
        at = min(self._core.next_deadline(), now + _LONGEST_SLEEP_S)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - now), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.post(TimePassed())

"""Calling a handler, plain or async, so that whatever it does comes back as an outcome. The named boundary.

A process that a handler forked and that returns here is not the one that got the message: it ends without a word.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from child.message import Message
from child.outcomes import Meta, of_exception, of_return

if TYPE_CHECKING:
    import asyncio

    from child.channel import Channel


class Caller:
    """Calls one handler, message after message."""

    def __init__(self, handler: Callable[..., Any], channel: Channel, *, with_sqlstate: bool = False) -> None:
        self._handler = handler
        self._channel = channel
        self._with_sqlstate = with_sqlstate
        self._pid = os.getpid()
        self.loop = Loop()

    def call(self, message: Message, *more: object) -> Meta | None:
        """The outcome as the meta of a RESULT; None: a plain success. Never raises."""
        try:
            returned = self._handler(message, *more)
            if returned is not None and hasattr(type(returned), "__await__"):
                returned = self.loop.run(returned)
            ack = message._ack  # noqa: SLF001 - what `archive()` or `delete()` left there: the runtime's side of it
            outcome = None if returned is None and ack is None else of_return(returned, ack)
        except BaseException as error:  # noqa: BLE001 - the handler boundary: sys.exit is a failed attempt here
            self._leave_if_copy()
            return of_exception(error, stopping=self._channel.stop_seen(), with_sqlstate=self._with_sqlstate)
        self._leave_if_copy()
        return outcome

    def _leave_if_copy(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)


class Loop:
    """The event loop of the process, made when it is first needed and kept for what handlers keep in it."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run to the end; raises what it raised. A loop that was left in a strange state is thrown away."""
        import asyncio  # noqa: PLC0415 - 24 ms that handlers without await need not pay
        import contextvars  # noqa: PLC0415 - see above

        if self._runner is None:
            self._runner = asyncio.Runner()
        ended: list[tuple[Any, BaseException | None]] = []
        try:
            self._runner.run(_capture(awaitable, ended), context=contextvars.copy_context())
        except BaseException:
            if not ended:
                self._replace()
                raise
        returned, error = ended[0]
        if error is not None:
            raise error
        return returned

    def _replace(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


async def _capture(awaitable: Awaitable[Any], ended: list[tuple[Any, BaseException | None]]) -> None:
    """Keep exits and interrupts from tearing through the loop: they are outcomes like others."""
    try:
        ended.append((await awaitable, None))
    except BaseException as error:  # noqa: BLE001 - the handler boundary of async handlers
        ended.append((None, error))

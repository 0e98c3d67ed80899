"""Regular mode: DISPATCH in, the start marked in shared memory, a result out. The parent settles.

The path of a message that succeeds is short on purpose: one frame each way, no JSON, no thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from child.abandoned import Abandoned
from child.caller import Caller
from child.farewell import flush_output
from child.message import Message
from child.process import calm_signals
from child.results import fit_result
from shared import syncpoints
from shared.wire.frames import HEADER, MAGIC, Dispatched, Frame, Kind, ProtocolError

if TYPE_CHECKING:
    from child.channel import Channel
    from child.title import Title

_SUCCESS: Final = int(Kind.SUCCESS)


def make_step(
    channel: Channel, caller: Caller, queue: str, title: Title, start_mark: memoryview
) -> Callable[[Frame | Dispatched], None]:
    """The function that serves one DISPATCH. Raises `Disconnected` and `ProtocolError`, nothing else."""
    pack, send, call = HEADER.pack, channel.send, caller.call
    hit = syncpoints.hit
    abandoned = Abandoned(channel)

    def serve(frame: Frame | Dispatched) -> None:
        if isinstance(frame, Frame):
            raise ProtocolError(f"unexpected {frame.kind.name}")
        message = Message(channel, queue, frame)
        seq = frame[0]
        channel.begin(seq)
        hit("child.dispatch.received")
        title.show_message(message.id, message.attempt)
        start_mark[0] = seq
        hit("child.handler.before")
        outcome = call(message)
        hit("child.handler.after")
        channel.wary = calm_signals()
        abandoned.end()
        flush_output()
        hit("child.result.before_send")
        if outcome is None:
            send(pack(MAGIC, _SUCCESS, 0, 0, 0, seq))
        else:
            send(fit_result(Kind.RESULT, seq, outcome))
        channel.end()
        hit("child.result.after_send")
        title.show_idle()

    return serve

"""From a running interpreter to a serving child: HELLO, imports, READY, and the loop.

All our modules are imported here, above, before the handler is: afterwards their names may be the application's.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from child.caller import Caller
from child.channel import Channel, Disconnected
from child.farewell import BOOT_FAILED, CONFUSED, PARENT_GONE, leave_in_order, leave_now
from child.imports import hand_over_imports
from child.loader import LoadError, load_handler
from child.metrics import keep_metrics_apart
from child.process import (
    prepare_stack_dump,
    raise_oom_score,
    resident_kb,
    shrug_at_group_signals,
    unbuffer_c_output,
)
from child.regular import make_step as make_regular_step
from child.results import fit_result
from child.title import Title
from shared import syncpoints
from shared.text import clean_text
from shared.wire.frames import PROTOCOL, Dispatched, Frame, Kind, ProtocolError, encode

if TYPE_CHECKING:
    from child.process import Ends


_OTHER_VERSION: Final = "the package was changed under the running supervisor: restart the supervisor"
_LATE: Final = frozenset({Kind.STOP, Kind.VERDICT})  # may come when their message is over

Step = Callable[[Frame | Dispatched], None]
MakeStep = Callable[[Channel, Callable[..., Any], Title], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the parent tells a child about itself. See docs/protocol.md."""

    queue: str
    slot: int
    incarnation: int
    mode: str
    handler: str
    app_dir: str
    dump_signal: int
    title: bool
    oom_score_adj: int
    metrics_dir: str | None
    metrics_identity: str | None
    meta: dict[str, Any]  # all of it, for the keys of transactional mode

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Hello:
        """Read the frame. Raises `ProtocolError` where a key is missing."""
        try:
            return cls(
                queue=meta["queue"],
                slot=int(meta["slot"]),
                incarnation=int(meta["incarnation"]),
                mode=meta["mode"],
                handler=meta["handler"],
                app_dir=meta["app_dir"],
                dump_signal=int(meta["dump_signal"]),
                title=bool(meta.get("title", True)),
                oom_score_adj=int(meta.get("oom_score_adj") or 0),
                metrics_dir=meta.get("metrics_dir"),
                metrics_identity=meta.get("metrics_identity"),
                meta=meta,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"HELLO lacks or mangles {error}") from error


def serve(ends: Ends, *, root: str, foreign: dict[str, ModuleType]) -> NoReturn:
    """Be a child until the parent says EXIT or is gone."""
    channel = Channel(ends.in_fd, ends.out_fd)
    try:
        step = _boot(channel, ends, root, foreign)
        _loop(channel, step)
    except Disconnected:
        leave_now(PARENT_GONE)
    except ProtocolError as error:
        print(f"pgmq-child: {error}", file=sys.stderr)
        leave_now(PARENT_GONE)
    leave_in_order(ends.stack_fd)


def _boot(channel: Channel, ends: Ends, root: str, foreign: dict[str, ModuleType]) -> Step:
    frame = channel.receive()
    if not isinstance(frame, Frame) or frame.kind is not Kind.HELLO:
        raise ProtocolError("the first frame is not HELLO")
    if frame.meta.get("protocol") != PROTOCOL:
        _boot_failed(channel, LoadError("version", _OTHER_VERSION))
    hello = Hello.from_meta(frame.meta)
    raise_oom_score(hello.oom_score_adj)
    prepare_stack_dump(hello.dump_signal, ends.stack_fd)
    unbuffer_c_output()
    syncpoints.switch_on_if_asked("child")
    title = Title(hello.queue, hello.slot, on=hello.title)
    title.show_starting()
    if hello.metrics_dir is not None and hello.metrics_identity is not None:
        keep_metrics_apart(hello.metrics_dir, hello.metrics_identity)
    make_step = _choose_mode(hello, ends.start_mark)
    hand_over_imports(root=root, app_dir=hello.app_dir, foreign=foreign)
    try:
        handler = load_handler(hello.handler, hello.mode)
    except LoadError as error:
        _boot_failed(channel, error)
    step = make_step(channel, handler, title)
    shrug_at_group_signals()  # a library may have put its own there while it was imported
    syncpoints.hit("child.boot.ready", {"queue": hello.queue})
    title.show_idle()
    channel.send(encode(Kind.READY, 0, {"rss_kb": resident_kb()}))
    return step


def _choose_mode(hello: Hello, start_mark: memoryview) -> MakeStep:
    """Import what the mode needs while the path is still ours."""
    if hello.mode == "transactional":
        from child.transactional import make_step as make_transactional_step  # noqa: PLC0415 - psycopg costs 100 ms

        return lambda channel, handler, title: make_transactional_step(channel, handler, title, hello.meta)
    return lambda channel, handler, title: make_regular_step(
        channel, Caller(handler, channel), hello.queue, title, start_mark
    )


def _boot_failed(channel: Channel, error: LoadError) -> NoReturn:
    """Say why and leave. Threads that the import has started are not waited for."""
    meta = {"kind": error.kind, "error": clean_text(error.error), "traceback": clean_text(error.traceback)}
    channel.send(fit_result(Kind.BOOT_FAILED, 0, meta))
    leave_now(BOOT_FAILED)


def _loop(channel: Channel, step: Step) -> None:
    """Serve until EXIT or the end of the stream. `channel.seq` tells whether a message is in hand."""
    while True:
        try:
            frame = channel.receive()
            if not isinstance(frame, Frame) or frame.kind is Kind.PERMIT:
                step(frame)
            elif frame.kind is Kind.EXIT:
                return
            elif frame.kind not in _LATE:
                raise ProtocolError(f"unexpected {frame.kind.name}")
            del frame  # a body may be large, and the wait for the next message long
        except ProtocolError:
            raise
        except Disconnected:
            if channel.seq:
                raise
            return  # the parent closed its end: the same as EXIT
        except BaseException:  # noqa: BLE001 - a signal function of a handler that fired outside of it
            if channel.seq:
                traceback.print_exc()
                leave_now(CONFUSED)  # whether the result went out cannot be known
            shrug_at_group_signals()

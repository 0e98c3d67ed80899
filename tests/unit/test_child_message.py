"""The message that a handler is given, without a process around it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from child.body import decode_json, encode_json
from child.channel import Channel, Disconnected
from child.limits import Allowance
from child.message import Message
from child.verdicts import ImpossibleDelay, InvalidMessage, Stopped
from shared.clock import boottime
from shared.wire.frames import Decoder, Frame, Kind, encode, encode_dispatch

MakeMessage = Callable[..., Message]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """The parent's socket and the child's channel."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Channel(theirs.fileno(), theirs.fileno())


@pytest.fixture
def make(ends: tuple[socket.socket, Channel]) -> MakeMessage:
    """A message in hand, number 1."""

    def message(
        headers: bytes = b"", body: bytes | None = b"{}", *, enqueued_us: int = 0, limit_ms: int = -1
    ) -> Message:
        channel = ends[1]
        channel.begin(1)
        return Message(channel, "orders", (1, 5, 2, 3, enqueued_us, limit_ms, headers, body))

    return message


def test_the_body_is_decoded_once_and_on_demand(make: MakeMessage) -> None:
    """Two looks give the same object."""
    message = make(body=b'{"a": [1, 2.5]}')
    assert message.body == {"a": [1, 2.5]}
    assert message.body is message.body


@pytest.mark.parametrize("body", [None, b"", b"{", b"\xff", b"[" * 16_000 + b"]" * 16_000])
def test_what_cannot_be_decoded_raises_each_time(make: MakeMessage, body: bytes | None) -> None:
    """And `raw` is there."""
    message = make(body=body)
    for _ in range(2):
        with pytest.raises(InvalidMessage):
            _ = message.body
    assert message.raw == (body or b"")


@pytest.mark.parametrize("text", [b"1e400", b"-1e400", b"[1.5e999]", b"1" * 6000, b"9223372036854775807", b"0.1"])
def test_numbers_survive_there_and_back(text: bytes) -> None:
    """What is decoded is encoded to the same value."""
    value = decode_json(text)
    assert decode_json(encode_json(value).encode()) == value


def test_what_json_cannot_say_is_refused() -> None:
    """NaN, objects, fractions beyond a double."""
    for value in (float("nan"), float("inf"), object(), Decimal("1.5"), Decimal("NaN")):
        with pytest.raises((TypeError, ValueError)):
            encode_json(value)


@pytest.mark.parametrize(
    ("headers", "seen"),
    [
        (b"", {}),
        (b'{"a": 1}', {"a": 1}),
        (b'{"a": 1, "x-supervisor": {"refunds": 1}}', {"a": 1}),
        (b'{"x-supervisor": {"headers": [1, 2]}}', {}),
        (b'{"x-supervisor": "forged"}', {}),
        (b"[1]", {}),
        (b"null", {}),
        (b"{broken", {}),
    ],
)
def test_headers_are_a_dict_without_our_entry(make: MakeMessage, headers: bytes, seen: dict[str, Any]) -> None:
    """Also where they are no object."""
    assert make(headers=headers).headers == seen


def test_enqueued_at_is_aware_and_bounded(make: MakeMessage) -> None:
    """Microseconds by the database's clock; what no datetime can hold is the end of time."""
    assert make(enqueued_us=1_000_001).enqueued_at == datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC)
    assert make(enqueued_us=2**62).enqueued_at.year == 9999
    assert make(enqueued_us=-(2**62)).enqueued_at.year == 1


@pytest.mark.parametrize(("after", "delay_ms"), [(0, 0), (1.5, 1500), ("250ms", 250), (timedelta(minutes=1), 60_000)])
def test_delays_in_every_form(make: MakeMessage, after: Any, delay_ms: int) -> None:
    """Seconds, timedelta, text."""
    assert make().retry(after=after).meta == {"kind": "retry", "delay_ms": delay_ms}


@pytest.mark.parametrize("after", [-0.001, 9_007_199_255, "x", float("nan"), timedelta.max, object(), True])
def test_impossible_delays_are_permanent(make: MakeMessage, after: Any) -> None:
    """Before any SQL."""
    with pytest.raises(ImpossibleDelay) as caught:
        make().retry(after=after)
    assert caught.value.permanent


# --- the channel ------------------------------------------------------------------------------------------------------


def test_a_stop_is_taken_out_and_other_frames_wait(ends: tuple[socket.socket, Channel], make: MakeMessage) -> None:
    """EXIT, sent while a handler runs, is read after it."""
    ours, channel = ends
    message = make()
    assert not message.stop_requested
    ours.sendall(encode(Kind.EXIT, 0) + encode(Kind.STOP, 9, {"reason": "old"}))
    assert not message.stop_requested
    ours.sendall(encode(Kind.STOP, 1, {"reason": "cancelled"}))
    assert message.stop_requested
    with pytest.raises(Stopped, match="cancelled"):
        message.raise_if_stopped()
    frame = channel.receive()
    assert isinstance(frame, Frame)
    assert frame.kind is Kind.EXIT


def test_a_message_that_is_over_reports_a_stop_and_says_nothing(
    ends: tuple[socket.socket, Channel], make: MakeMessage
) -> None:
    """A thread that a handler left behind comes to an end, and its remarks are not sent."""
    ours, channel = ends
    message = make()
    channel.end()
    assert message.stop_requested
    message.progress("late")
    message.log.info("late")
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)


def test_a_parent_that_is_gone_is_a_stop(ends: tuple[socket.socket, Channel], make: MakeMessage) -> None:
    """And then the end of the stream."""
    ours, channel = ends
    message = make()
    ours.shutdown(socket.SHUT_RDWR)
    assert message.stop_requested
    with pytest.raises(Disconnected):
        channel.receive()


@pytest.mark.parametrize("size", [0, 100, 65_000, 70_000, 3_000_000])
@pytest.mark.parametrize("cut", [1, 19, 20, 21, 64, 60_000])
def test_frames_arrive_whole_however_they_are_cut(ends: tuple[socket.socket, Channel], size: int, cut: int) -> None:
    """Small, large, in pieces, and with the next one behind them."""
    ours, channel = ends
    message = (3, 7, 1, 1, 1, -1, b"{}", b"x" * size)
    data = encode_dispatch(message) + encode(Kind.STOP, 3, {"reason": "shutdown"})

    def feed() -> None:
        ours.sendall(data[:cut])
        ours.sendall(data[cut:])

    thread = threading.Thread(target=feed)
    thread.start()
    work = channel.receive()
    assert work == message
    assert type(work[-1]) is bytes
    frame = channel.receive()
    thread.join(10)
    assert isinstance(frame, Frame)
    assert frame.kind is Kind.STOP


@pytest.mark.parametrize("cuts", [(0,), (10, 0), (40, 10, 0), (-5,), (0, -5)])
def test_a_body_that_is_itself_a_frame_is_a_body(ends: tuple[socket.socket, Channel], cuts: tuple[int, ...]) -> None:
    """Cut so many bytes before its beginning: a read of the child begins with what looks like a message of its own."""
    ours, channel = ends
    forged = encode_dispatch((4, 666, 1, 1, 1, -1, b"", b"forged"))
    message = (3, 7, 1, 1, 1, -1, b"{}", forged)
    data = encode_dispatch(message)
    ends_of_reads = [len(data) - len(forged) - cut for cut in cuts]
    for start, end in itertools.pairwise([0, *ends_of_reads]):
        ours.sendall(data[start:end])
        with pytest.raises(TimeoutError):
            channel.receive(timeout_s=0)
    ours.sendall(data[ends_of_reads[-1] :])
    assert channel.receive(timeout_s=0) == message


def test_the_time_left_counts_from_the_making(make: MakeMessage) -> None:
    """That is when the handler starts, however long the message was under way; never negative, None without a limit."""
    before = boottime()
    message = make(limit_ms=10_000)
    left_s = message.time_left()
    assert left_s is not None
    assert 10.0 - (boottime() - before) <= left_s <= 10.0
    assert make(limit_ms=0).time_left() == 0
    assert make(limit_ms=-1).time_left() is None


def test_remarks_are_frames(ends: tuple[socket.socket, Channel], make: MakeMessage) -> None:
    """PROGRESS and LOG with the message's number."""
    ours, _ = ends
    message = make()
    message.progress("half\x00way")
    message.log.warning("careful")
    progress, log = Decoder().feed(ours.recv(1 << 16))
    assert (progress.kind, progress.seq, progress.meta) == (Kind.PROGRESS, 1, {"text": "halfway"})
    assert (log.kind, log.seq, log.meta) == (Kind.LOG, 1, {"level": "warning", "text": "careful"})


def test_an_allowance_fills_again() -> None:
    """A burst, then so many a second."""
    allowance = Allowance(burst=3, per_s=2, now=10.0)
    assert [allowance.take(10.0) for _ in range(5)] == [True, True, True, False, False]
    assert [allowance.take(10.5) for _ in range(2)] == [True, False]
    assert [allowance.take(1000.0) for _ in range(4)] == [True, True, True, False]

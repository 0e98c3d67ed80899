"""A stand-in for `child/__main__.py` that speaks frames and misbehaves as its HELLO's `handler` says.

Executed by path with the child's arguments. Each scenario is a function that gets, after the first DISPATCH,
its claim id.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.wire.frames import HEADER, MAGIC, Decoder, Frame, Kind, encode
from shared.wire.startmark import map_mark

_IN_FD, _OUT_FD, _STACK_FD = (int(argument) for argument in sys.argv[1:4])
_mark = map_mark(_STACK_FD)


def begin(seq: int) -> None:
    """Mark the handler as begun."""
    _mark[0] = seq


def send(data: bytes) -> None:
    """Write all of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(_OUT_FD, left) :]


def die() -> None:
    """SIGKILL ourselves."""
    os.kill(os.getpid(), signal.SIGKILL)


def done_and_die(seq: int) -> None:
    """A whole result in the moment of death."""
    begin(seq)
    send(encode(Kind.SUCCESS, seq))
    die()


def much_and_die(seq: int) -> None:
    """A result that nearly fills the pipe, in the moment of death."""
    begin(seq)
    send(encode(Kind.RESULT, seq, {"kind": "reject", "reason": "x" * 60_000}))
    die()


def half_a_result(seq: int) -> None:
    """Death in the middle of a result."""
    begin(seq)
    send(encode(Kind.RESULT, seq, {"kind": "success"})[:-3])
    die()


def noise(seq: int) -> None:
    """What is no frame."""
    send(os.urandom(4096).replace(bytes([MAGIC]), b"x"))
    time.sleep(600)


def wrong_seq(seq: int) -> None:
    """The result of a message that was not dispatched."""
    begin(seq)
    send(encode(Kind.SUCCESS, seq + 1))
    time.sleep(600)


def result_twice(seq: int) -> None:
    """Two results for one message."""
    begin(seq)
    send(2 * encode(Kind.SUCCESS, seq))
    time.sleep(600)


def strange_delay(seq: int) -> None:
    """A delay beyond what PostgreSQL can add."""
    begin(seq)
    send(encode(Kind.RESULT, seq, {"kind": "retry", "delay_ms": 1 << 60}))
    time.sleep(600)


def unknown_kind(seq: int) -> None:
    """An outcome that does not exist."""
    begin(seq)
    send(encode(Kind.RESULT, seq, {"kind": "perhaps"}))
    time.sleep(600)


def parent_frame(seq: int) -> None:
    """A frame of the other direction."""
    begin(seq)
    send(encode(Kind.EXIT, seq))
    time.sleep(600)


def huge_body(seq: int) -> None:
    """A header that announces 200 MB, and then the bytes."""
    send(HEADER.pack(MAGIC, Kind.RESULT, 0, 0, 200 << 20, seq))
    try:
        while True:
            send(bytes(1 << 16))
    except OSError:
        time.sleep(600)


def goes_silent(seq: int) -> None:
    """Closes its pipes and lives on."""
    begin(seq)
    os.closerange(3, 1024)
    time.sleep(600)


def byte_by_byte(seq: int) -> None:
    """A correct answer in the smallest pieces."""
    begin(seq)
    answer = encode(Kind.PROGRESS, seq, {"text": "half"}) + encode(Kind.SUCCESS, seq)
    for index in range(len(answer)):
        send(answer[index : index + 1])
        time.sleep(0.001)
    time.sleep(600)


def stale_progress(seq: int) -> None:
    """A left-over thread reports progress of an earlier message; then the answer to this one."""
    begin(seq)
    send(encode(Kind.PROGRESS, 999_999, {"text": "old"}) + encode(Kind.SUCCESS, seq))
    time.sleep(600)


def body_size(seq: int) -> None:
    """Answers how long the body was."""
    begin(seq)
    send(encode(Kind.RESULT, seq, {"kind": "reject", "reason": str(_last_body)}))
    time.sleep(600)


_last_body = 0


def transaction(seq: int) -> None:
    """The transactional conversation, committed when the verdict is an ack."""
    claimed = {
        "msg_id": 7,
        "read_ct": 1,
        "enqueued_us": 5,
        "visible_us": 6,
        "accounts": None,
        "xid": 9,
        "backend_pid": 10,
        "backend_start_us": 11,
        "read_us": 12,
    }
    send(encode(Kind.TX_CLAIMED, seq, claimed) + encode(Kind.STARTED, seq))
    send(encode(Kind.COMMIT_REQUEST, seq, {"kind": "success"}))
    verdict = receive()
    if verdict.meta["verdict"] == "ack":
        send(encode(Kind.COMMITTED, seq))
    else:
        ended = {"error": None, "sqlstate": None, "in_doubt": False, "claimed": True}
        send(encode(Kind.TX_ENDED, seq, ended))


_decoder = Decoder()
_frames: list[Frame] = []


def receive() -> Frame:
    """The next frame; the process ends with the stream."""
    while not _frames:
        data = os.read(_IN_FD, 1 << 20)
        if not data:
            sys.exit(0)
        _frames.extend(_decoder.feed(data))
    return _frames.pop(0)


def main() -> None:
    """READY, then the scenario for each message."""
    global _last_body  # noqa: PLW0603 - a script
    scenario = receive().meta["handler"]
    send(encode(Kind.READY, 0, {"rss_kb": 1000}))
    while True:
        frame = receive()
        if frame.kind is Kind.EXIT:
            sys.exit(0)
        if frame.kind in {Kind.DISPATCH, Kind.PERMIT}:
            _last_body = len(frame.body)
            globals()[scenario](frame.seq)


main()

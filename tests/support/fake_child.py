"""A stand-in for `child/__main__.py` that speaks frames and misbehaves as its HELLO's `handler` says.

Executed by path with the child's arguments. Each scenario is a function that gets the socket and, after the first
DISPATCH, its claim id.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.wire.frames import HEADER, MAGIC, Decoder, Frame, Kind, encode
from shared.wire.startmark import map_mark

_mark = map_mark(int(sys.argv[2]))


def begin(seq: int) -> None:
    """Mark the handler as begun."""
    _mark[0] = seq


def die() -> None:
    """SIGKILL ourselves."""
    os.kill(os.getpid(), signal.SIGKILL)


def done_and_die(sock: socket.socket, seq: int) -> None:
    """A whole result in the moment of death."""
    begin(seq)
    sock.sendall(encode(Kind.SUCCESS, seq))
    die()


def much_and_die(sock: socket.socket, seq: int) -> None:
    """A result of more than one read in the moment of death."""
    begin(seq)
    sock.sendall(encode(Kind.RESULT, seq, {"kind": "reject", "reason": "x" * 100_000}))
    die()


def half_a_result(sock: socket.socket, seq: int) -> None:
    """Death in the middle of a result."""
    begin(seq)
    sock.sendall(encode(Kind.RESULT, seq, {"kind": "success"})[:-3])
    die()


def noise(sock: socket.socket, seq: int) -> None:
    """What is no frame."""
    sock.sendall(os.urandom(4096).replace(bytes([MAGIC]), b"x"))
    time.sleep(600)


def wrong_seq(sock: socket.socket, seq: int) -> None:
    """The result of a message that was not dispatched."""
    begin(seq)
    sock.sendall(encode(Kind.SUCCESS, seq + 1))
    time.sleep(600)


def result_twice(sock: socket.socket, seq: int) -> None:
    """Two results for one message."""
    begin(seq)
    sock.sendall(2 * encode(Kind.SUCCESS, seq))
    time.sleep(600)


def strange_delay(sock: socket.socket, seq: int) -> None:
    """A delay beyond what PostgreSQL can add."""
    begin(seq)
    sock.sendall(encode(Kind.RESULT, seq, {"kind": "retry", "delay_ms": 1 << 60}))
    time.sleep(600)


def unknown_kind(sock: socket.socket, seq: int) -> None:
    """An outcome that does not exist."""
    begin(seq)
    sock.sendall(encode(Kind.RESULT, seq, {"kind": "perhaps"}))
    time.sleep(600)


def parent_frame(sock: socket.socket, seq: int) -> None:
    """A frame of the other direction."""
    begin(seq)
    sock.sendall(encode(Kind.EXIT, seq))
    time.sleep(600)


def huge_body(sock: socket.socket, seq: int) -> None:
    """A header that announces 200 MB, and then the bytes."""
    sock.sendall(HEADER.pack(MAGIC, Kind.RESULT, 0, 0, 200 << 20, seq))
    try:
        while True:
            sock.sendall(bytes(1 << 16))
    except OSError:
        time.sleep(600)


def goes_silent(sock: socket.socket, seq: int) -> None:
    """Closes the socket and lives on."""
    begin(seq)
    os.closerange(3, 1024)
    time.sleep(600)


def byte_by_byte(sock: socket.socket, seq: int) -> None:
    """A correct answer in the smallest pieces."""
    begin(seq)
    answer = encode(Kind.PROGRESS, seq, {"text": "half"}) + encode(Kind.SUCCESS, seq)
    for index in range(len(answer)):
        sock.sendall(answer[index : index + 1])
        time.sleep(0.001)
    time.sleep(600)


def stale_progress(sock: socket.socket, seq: int) -> None:
    """A left-over thread reports progress of an earlier message; then the answer to this one."""
    begin(seq)
    sock.sendall(encode(Kind.PROGRESS, 999_999, {"text": "old"}) + encode(Kind.SUCCESS, seq))
    time.sleep(600)


def body_size(sock: socket.socket, seq: int) -> None:
    """Answers how long the body was."""
    begin(seq)
    sock.sendall(encode(Kind.RESULT, seq, {"kind": "reject", "reason": str(_last_body)}))
    time.sleep(600)


_last_body = 0


def transaction(sock: socket.socket, seq: int) -> None:
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
    sock.sendall(encode(Kind.TX_CLAIMED, seq, claimed) + encode(Kind.STARTED, seq))
    sock.sendall(encode(Kind.COMMIT_REQUEST, seq, {"kind": "success"}))
    verdict = receive(sock)
    if verdict.meta["verdict"] == "ack":
        sock.sendall(encode(Kind.COMMITTED, seq))
    else:
        ended = {"error": None, "sqlstate": None, "in_doubt": False, "claimed": True}
        sock.sendall(encode(Kind.TX_ENDED, seq, ended))


_decoder = Decoder()
_frames: list[Frame] = []


def receive(sock: socket.socket) -> Frame:
    """The next frame; the process ends with the stream."""
    while not _frames:
        data = sock.recv(1 << 20)
        if not data:
            sys.exit(0)
        _frames.extend(_decoder.feed(data))
    return _frames.pop(0)


def main() -> None:
    """READY, then the scenario for each message."""
    global _last_body  # noqa: PLW0603 - a script
    sock = socket.socket(fileno=int(sys.argv[1]))
    scenario = receive(sock).meta["handler"]
    sock.sendall(encode(Kind.READY, 0, {"rss_kb": 1000}))
    while True:
        frame = receive(sock)
        if frame.kind is Kind.EXIT:
            sys.exit(0)
        if frame.kind in {Kind.DISPATCH, Kind.PERMIT}:
            _last_body = len(frame.body)
            globals()[scenario](sock, frame.seq)


main()

"""Who is at the other end of a unix socket: the kernel says it, nobody can forge it."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

_UCRED: Final = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """Return the user that the other end had when it connected, or listened."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def is_trusted(uid: int) -> bool:
    """Only the user that we run as, and root, may steer us; and only they are asked."""
    return uid in {os.geteuid(), 0}

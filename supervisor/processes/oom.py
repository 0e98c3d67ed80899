"""Was it the kernel's out-of-memory killer? Its counters around a SIGKILL that we did not send.

cgroup v2 memory.events, else v1 memory.oom_control, else the machine's /proc/vmstat. An increment answers for one
death only, and only for a short time: somebody else's SIGKILL must not be taken for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

_FRESH_S: Final = 3.0


class OomWatch:
    """Remembers increments of the counter until a death claims them."""

    def __init__(self, *, clock: Callable[[], float], counter: Callable[[], int] | None = None) -> None:
        """Find the counter and read it for the first time."""
        self._clock = clock
        self._counter = counter if counter is not None else find_counter()
        self._last = self._counter()
        self._increments: deque[float] = deque(maxlen=64)

    def note(self) -> None:
        """Read the counter; on a timer, so that an old increment is known to be old."""
        now = self._counter()
        for _ in range(min(now - self._last, 64)):
            self._increments.append(self._clock())
        self._last = now

    def claim(self) -> bool:
        """Whether a SIGKILL that was not ours came from the kernel; uses one increment up."""
        self.note()
        oldest = self._clock() - _FRESH_S
        while self._increments:
            if self._increments.popleft() >= oldest:
                return True
        return False


def find_counter(*, proc: Path = Path("/proc")) -> Callable[[], int]:
    """A function that reads the best counter of kills for our own control group."""
    for path in candidates((proc / "self/cgroup").read_text(), (proc / "self/mountinfo").read_text()):
        if read_counter(path) is not None:
            return lambda: read_counter(path) or 0
    return lambda: read_counter(proc / "vmstat") or 0


def candidates(cgroup: str, mountinfo: str) -> list[Path]:
    """Files that may hold the counter, best first, from the texts of /proc/self/cgroup and mountinfo."""
    mounts: dict[str, tuple[str, str]] = {}  # "v2" | "v1" -> (root of the mount, mount point)
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        if types[0] == "cgroup2":
            mounts.setdefault("v2", (fields[3], fields[4]))
        elif types[0] == "cgroup" and "memory" in types[2].split(","):
            mounts.setdefault("v1", (fields[3], fields[4]))
    found: list[Path] = []
    for version, name in (("v2", "memory.events"), ("v1", "memory.oom_control")):
        if version not in mounts:
            continue
        root, point = mounts[version]
        for line in cgroup.splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if (number == "0" and version == "v2") or (version == "v1" and "memory" in controllers.split(",")):
                relative = path.removeprefix(root) if root != "/" else path
                found += [Path(point) / relative.strip("/") / name, Path(point) / name]
    return found


def read_counter(path: Path) -> int | None:
    """The value of `oom_kill` in a file of that kind; None where there is none."""
    try:
        text = path.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None

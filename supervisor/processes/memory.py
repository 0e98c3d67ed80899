"""Memory of a child's process tree, measured while it runs and only where a limit is set.

The sum of resident sets counts shared pages several times and is cheap; only above the limit the proportional sets
are read, which are right and dear.
"""

from __future__ import annotations

from supervisor.processes import procfs


def tree_bytes(pid: int, orphans: list[int], *, limit_bytes: int) -> int:
    """Bytes of a process, its descendants and its orphans: exact above the limit, an upper bound below it."""
    pids = [pid, *procfs.read_descendants(pid)]
    for orphan in orphans:
        pids += [orphan, *procfs.read_descendants(orphan)]
    resident = sum(map(procfs.read_rss_bytes, pids))
    if resident <= limit_bytes:
        return resident
    return sum(map(procfs.read_pss_bytes, pids))

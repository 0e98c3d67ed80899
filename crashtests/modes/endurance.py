"""Endurance: one supervisor and a thousand deaths under it, with a watch on memory, descriptors and processes.

Every message kills its child at the first attempt and succeeds at the second, so that each death has a message in hand.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from crashtests.checker import Allowed, Finding, Verdict, check, count_repeats
from crashtests.ground import Ground
from crashtests.scene import REGULAR, Scene, scene, usual_queues

__all__ = ["Endurance", "Sample", "run_endurance"]

_LIMIT_S_A_DEATH: Final = 5.0
_PERIOD_S: Final = 0.5
_MORE_DESCRIPTORS: Final = 8
_MORE_MEMORY: Final = 1.25
_MORE_MEMORY_KB: Final = 16 << 10
_MOST_ZOMBIES: Final = 8  # at one look: each is reaped within milliseconds
_MANY: Final = "100000"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the parent."""

    descriptors: int
    rss_kb: int
    zombies: int
    processes: int  # all that it started and that live


@dataclass(frozen=True, slots=True)
class Endurance:
    """What was seen."""

    deaths: int
    seconds: float
    early: Sample
    late: Sample
    findings: tuple[Finding, ...]


def run_endurance(ground: Ground, deaths: int, *, tell: Callable[[str], None] = lambda _: None) -> Endurance:
    """Live through so many deaths on four slots."""
    queue = usual_queues(concurrency="4", max_attempts=_MANY, max_deaths=_MANY)[REGULAR]
    with ground.database() as dsn, scene(dsn, {REGULAR: queue}, with_points=False) as place:
        place.create_queues()
        for number in range(deaths):
            place.send(REGULAR, f"d{number}", ends="kill")
        began = time.monotonic()
        place.stage.start()
        samples = _watch(place, deaths, tell)
        seconds = time.monotonic() - began
        truth = place.truth(place.stage.stop())
        findings = check(truth, Allowed(repeats=deaths))
        quarter = max(1, len(samples) // 4)
        early, late = _most(samples[:quarter]), _most(samples[-quarter:])
        findings += _compare(early, late)
        return Endurance(count_repeats(truth), seconds, early, late, tuple(findings))


def _watch(place: Scene, deaths: int, tell: Callable[[str], None]) -> list[Sample]:
    samples: list[Sample] = []
    deadline = time.monotonic() + 60.0 + deaths * _LIMIT_S_A_DEATH
    while not place.wait_ended(place.sent, _PERIOD_S) and place.stage.running and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            samples.append(_look(place))
            if len(samples) % 40 == 0:
                tell(f"{len(samples) * _PERIOD_S:.0f} s: {samples[-1]}")
    return samples or [Sample(0, 0, 0, 0)]


def _look(place: Scene) -> Sample:
    pid = place.stage.parent.pid
    with open(f"/proc/{pid}/statm", "rb") as file:
        pages = int(file.read().split()[1])
    zombies = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                zombies += state == "Z" and parent == str(pid)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(descriptors, pages * os.sysconf("SC_PAGE_SIZE") // 1024, zombies, len(place.stage.left_over()))


def _most(samples: list[Sample]) -> Sample:
    return Sample(
        max(sample.descriptors for sample in samples),
        max(sample.rss_kb for sample in samples),
        max(sample.zombies for sample in samples),
        max(sample.processes for sample in samples),
    )


def _compare(early: Sample, late: Sample) -> list[Finding]:
    """What grows with the number of deaths is a leak."""
    found = []
    if late.descriptors > early.descriptors + _MORE_DESCRIPTORS:
        found.append(f"descriptors grew from {early.descriptors} to {late.descriptors}")
    if late.rss_kb > early.rss_kb * _MORE_MEMORY + _MORE_MEMORY_KB:
        found.append(f"memory grew from {early.rss_kb} KiB to {late.rss_kb} KiB")
    if late.zombies > _MOST_ZOMBIES:
        found.append(f"{late.zombies} zombies at one look")
    if late.processes > early.processes + _MORE_DESCRIPTORS:
        found.append(f"processes grew from {early.processes} to {late.processes}")
    return [Finding(Verdict.FAIL, "endurance", text) for text in found]

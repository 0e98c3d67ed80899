"""Mode *network*: a proxy between supervisor and PostgreSQL cuts, freezes, delays, swallows and withholds.

Each scenario says what the failure model promises of it: how many handlers may run again, and what must be there.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psycopg

from crashtests.checker import Allowed, Finding, Verdict, check, count_repeats, worst
from crashtests.ground import Ground
from crashtests.processes import wait_until
from crashtests.proxy import Proxy, What
from crashtests.scene import LEASE_S, REGULAR, TRANSACTIONAL, Scene, scene, usual_queues

__all__ = ["SCENARIOS", "NetworkRun", "Scenario", "run_network"]

_BEGIN_S: Final = 60.0
_END_S: Final = 120.0
_MANY: Final = "1000"
_LOAD: Final = 20  # messages of each queue
_AFTER_TROUBLE_S: Final = 1.0

# What the statements of the product are known by on the wire.
_COMMIT: Final = "commit$"
_TX_SESSION: Final = b"pgmq-supervisor " + TRANSACTIONAL.encode()
_ACK: Final = f'"pgmq"."a_{REGULAR}'
_CLAIM: Final = "with due as materialized"
_RECKONING: Final = "with held as materialized"
_RECKONER: Final = b"pgmq-supervisor reckon"
_RENEWER: Final = b"pgmq-supervisor renew"


@dataclass(frozen=True, slots=True)
class Scenario:
    """`trouble` gets the scene and the proxy, sends what it needs, and says in which way it did not take place."""

    name: str
    promise: str
    repeats: int  # handlers that may run again
    trouble: Callable[[Scene, Proxy, random.Random], str | None]


@dataclass(frozen=True, slots=True)
class NetworkRun:
    """One scenario, carried out once."""

    scenario: Scenario
    seed: int
    verdict: Verdict
    messages: int
    repeats: int
    findings: tuple[Finding, ...] = ()
    log: str = ""


def run_network(
    ground: Ground,
    scenarios: Sequence[Scenario],
    *,
    seed: int = 1,
    runs: int = 1,
    workers: int = 3,
    tell: Callable[[NetworkRun], None] = lambda _: None,
) -> list[NetworkRun]:
    """Carry out each scenario `runs` times."""

    def work(task: tuple[Scenario, int]) -> NetworkRun:
        run = _run(ground, *task)
        tell(run)
        return run

    tasks = [(scenario, seed + turn) for scenario in scenarios for turn in range(runs)]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(work, tasks))


def _run(ground: Ground, scenario: Scenario, seed: int) -> NetworkRun:
    options = {"max_attempts": _MANY, "max_deaths": _MANY, "concurrency": "2"}
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(ground.database())
        proxy = stack.enter_context(contextlib.closing(Proxy(dsn)))
        place = stack.enter_context(scene(dsn, usual_queues(**options), with_points=False, service_dsn=proxy.dsn))
        try:
            place.create_queues()
            missed = scenario.trouble(place, proxy, random.Random(seed))
            proxy.thaw()
            ended = place.wait_ended(place.sent, _END_S)
            truth = place.truth(place.stage.stop())
        except (psycopg.Error, OSError) as error:
            missed, truth, ended = repr(error), None, False
        log = place.stage.log_tail()
        findings: tuple[Finding, ...] = ()
        if truth is not None:
            findings = tuple(check(truth, Allowed(frozenset({TRANSACTIONAL}), repeats=scenario.repeats, overlaps=True)))
        if missed is not None:
            findings += (Finding(Verdict.UNKNOWN, "scenario", missed),)
        verdict = worst(findings)
        repeats = 0 if truth is None else count_repeats(truth)
        return NetworkRun(
            scenario, seed, verdict, len(place.sent), repeats, findings, "" if verdict is Verdict.OK and ended else log
        )


# --- troubles ---------------------------------------------------------------------------------------------------------


def _load(place: Scene, *, sleep_ms: int = 100) -> None:
    """Messages in both queues, and a supervisor that has begun to work on them."""
    for number in range(_LOAD):
        place.send(REGULAR, f"r{number}", sleep_ms=sleep_ms)
        place.send(TRANSACTIONAL, f"t{number}", sleep_ms=sleep_ms)
    place.stage.start()
    wait_until(place.ledger.exists, _BEGIN_S)


def _cut_again_and_again(place: Scene, proxy: Proxy, rng: random.Random) -> str | None:
    _load(place)
    for _ in range(5):
        time.sleep(rng.uniform(0.1, 0.6))
        proxy.cut()
    return None


def _freeze_within_a_lease(place: Scene, proxy: Proxy, rng: random.Random) -> str | None:
    _load(place)
    time.sleep(rng.uniform(0.1, 0.4))
    proxy.freeze()
    time.sleep(LEASE_S / 4)
    proxy.thaw()
    return None


def _freeze_beyond_a_lease(place: Scene, proxy: Proxy, rng: random.Random) -> str | None:
    _load(place)
    time.sleep(rng.uniform(0.1, 0.4))
    proxy.freeze()
    time.sleep(LEASE_S * 1.5)
    proxy.thaw()
    return None


def _late(place: Scene, proxy: Proxy, rng: random.Random) -> str | None:
    proxy.late_s = rng.uniform(0.02, 0.06)
    _load(place)
    return None


def _away(place: Scene, proxy: Proxy, rng: random.Random) -> str | None:
    _load(place)
    time.sleep(rng.uniform(0.1, 0.4))
    proxy.refusing = True
    proxy.cut()
    time.sleep(LEASE_S / 2)
    proxy.refusing = False
    return None


def _touch(queue: str, pattern: str, what: What, *, who: bytes = b"", **body: object) -> Callable[..., str | None]:
    """One message, and the statement about it that gets lost."""

    def trouble(place: Scene, proxy: Proxy, _rng: random.Random) -> str | None:
        place.stage.start()
        if not wait_until(lambda: len(place.stage.children()) == 4, _BEGIN_S):
            return "its children did not start"
        time.sleep(_AFTER_TROUBLE_S)  # until the first, empty claims are over
        tripwire = proxy.tripwire(pattern, what, who=who)
        place.send(queue, "the one", **body)
        return None if tripwire.wait(_BEGIN_S) else "nobody said what was waited for"

    return trouble


_IN_HAND: Final = 4

SCENARIOS: Final = (
    Scenario("connections cut 5 times under load", "nothing lost", 5 * _IN_HAND, _cut_again_and_again),
    Scenario(
        "frozen within a lease", "nothing lost, only transactions may run again", _IN_HAND, _freeze_within_a_lease
    ),
    Scenario("frozen beyond a lease", "leases lapse, their handlers run again", 2 * _IN_HAND, _freeze_beyond_a_lease),
    Scenario("every packet late by 20 to 60 ms", "only slower", 0, _late),
    Scenario("cut and refused for half a lease", "nothing lost, transactions run again", _IN_HAND, _away),
    Scenario(
        "COMMIT's answer swallowed",
        "in doubt, decided by the row: committed, no rerun",
        0,
        _touch(TRANSACTIONAL, _COMMIT, What.SWALLOW, who=_TX_SESSION),
    ),
    Scenario(
        "COMMIT never arrives",
        "in doubt, decided by the row: rolled back, charged, run again",
        1,
        _touch(TRANSACTIONAL, _COMMIT, What.WITHHOLD, who=_TX_SESSION),
    ),
    Scenario("ack's answer swallowed", "said again, the row is gone: no rerun", 0, _touch(REGULAR, _ACK, What.SWALLOW)),
    Scenario("ack never arrives", "said again within the lease: no rerun", 0, _touch(REGULAR, _ACK, What.WITHHOLD)),
    Scenario(
        "claim's answer swallowed",
        "claimed by nobody: back after its lease",
        0,
        _touch(REGULAR, _CLAIM, What.SWALLOW),
    ),
    Scenario(
        "reckoning's answer swallowed",
        "said again, charged once",
        1,
        _touch(TRANSACTIONAL, _RECKONING, What.SWALLOW, who=_RECKONER, ends="exit"),
    ),
    Scenario(
        "reckoning never arrives",
        "said again, charged once",
        1,
        _touch(TRANSACTIONAL, _RECKONING, What.WITHHOLD, who=_RECKONER, ends="exit"),
    ),
    Scenario(
        "renewal's answer swallowed",
        "renewed again before the deadline: no rerun",
        0,
        _touch(REGULAR, _RECKONING, What.SWALLOW, who=_RENEWER, sleep_ms=4000),
    ),
)

"""What differs from story to story: settings, messages, and what their handlers do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, Final

from shared.pgmq.records import AckMode
from supervisor.core.settings import CoreSettings, QueueSettings, RetryPolicy, Timing
from supervisor.core.types import DeathFacts, ErrorInfo, Mode, Outcome, OutcomeKind

ERROR: Final = ErrorInfo("ValueError", "no", "")
CONFLICT: Final = Outcome(OutcomeKind.ERROR, error=ERROR, sqlstate="40001")


def facts(*, signal: str | None = None, exit_code: int | None = None, oom: bool = False) -> DeathFacts:
    """The end of a process."""
    return DeathFacts(exit_code, signal, 30_000, 0.1, "", "", oom)


KILLED: Final = facts(signal="SIGKILL")
KILLED_BY_GUARD: Final = replace(KILLED, by_guard=True)
DEATHS: Final = (facts(signal="SIGSEGV"), facts(exit_code=0), facts(exit_code=1), facts(signal="SIGKILL", oom=True))


class Nature(StrEnum):
    """What a message does to whoever runs it."""

    GOOD = "good"
    SLOW = "slow"
    FLAKY = "flaky"
    FAILING = "failing"
    PERMANENT = "permanent"
    POISON = "poison"
    POISON_ONCE = "poison_once"
    HANGING = "hanging"
    RETRYING = "retrying"
    REJECTING = "rejecting"
    ABANDONING = "abandoning"
    INVALID = "invalid"
    EARLY = "early"  # its child dies before the handler starts
    HOG = "hog"
    CONFLICTING = "conflicting"


class Ending(StrEnum):
    RESULT = "result"
    DIES_EARLY = "dies_early"
    DIES = "dies"
    DIES_WITH_RESULT = "dies_with_result"  # in the same instant: the result does not get out
    DIES_AFTER_RESULT = "dies_after_result"  # in the same instant: the whole result got out
    HANGS = "hangs"
    HOGS = "hogs"


class Reaction(StrEnum):
    """To a stop request."""

    STOPS = "stops"
    FINISHES = "finishes"
    IGNORES = "ignores"


@dataclass(frozen=True, slots=True)
class Script:
    ending: Ending
    outcome: Outcome
    takes_s: float
    reaction: Reaction
    death: DeathFacts


_SUCCESS: Final = Outcome(OutcomeKind.SUCCESS)
_FAILED: Final = Outcome(OutcomeKind.ERROR, error=ERROR)
_OUTCOMES: Final = {
    Nature.FAILING: _FAILED,
    Nature.PERMANENT: Outcome(OutcomeKind.ERROR, error=ERROR, permanent=True),
    Nature.REJECTING: Outcome(OutcomeKind.REJECT, reason="not mine"),
    Nature.ABANDONING: Outcome(OutcomeKind.ABANDON),
    Nature.INVALID: Outcome(OutcomeKind.INVALID_MESSAGE, error=ERROR),
}
_ENDINGS: Final = {
    Nature.POISON: Ending.DIES,
    Nature.HANGING: Ending.HANGS,
    Nature.EARLY: Ending.DIES_EARLY,
    Nature.HOG: Ending.HOGS,
}


def script(rng: Random, nature: Nature, run: int, settings: QueueSettings) -> Script:
    """What the handler does on its `run`-th run (from 1) of a message."""
    outcome, ending = _OUTCOMES.get(nature, _SUCCESS), _ENDINGS.get(nature, Ending.RESULT)
    takes_s = rng.uniform(0.0005, 0.05)
    if nature is Nature.SLOW:
        takes_s = settings.visibility_timeout_s * rng.uniform(0.2, 2.0)
    elif nature is Nature.FLAKY and run <= 2:
        outcome = _FAILED
    elif nature is Nature.POISON_ONCE and run == 1:
        ending = Ending.DIES
    elif nature is Nature.RETRYING and run <= 2:
        outcome = Outcome(OutcomeKind.RETRY, delay_ms=rng.choice((0, 100, 2000)))
    elif nature is Nature.CONFLICTING and run <= 12 and settings.mode is Mode.TRANSACTIONAL:
        outcome = CONFLICT
    if ending is Ending.HANGS and settings.hard_timeout_s is None:
        ending, takes_s = Ending.RESULT, 1.0
    if ending is Ending.HOGS and settings.memory_limit_bytes is None:
        ending, outcome = Ending.DIES, _FAILED
    if outcome is _SUCCESS and rng.random() < 0.1:
        outcome = Outcome(OutcomeKind.SUCCESS, ack=rng.choice((AckMode.ARCHIVE, AckMode.DELETE)))
    return Script(ending, outcome, takes_s, rng.choice(tuple(Reaction)), rng.choice(DEATHS))


def random_natures(rng: Random) -> list[Nature]:
    """The mixture of one story: half of the messages are good, the rest of a few kinds."""
    kinds = rng.sample(tuple(Nature), rng.randint(1, 6))
    return [Nature.GOOD] * len(kinds) + kinds


def random_headers(rng: Random, queue: str, msg_id: int) -> tuple[Any, bool]:
    """Headers of a new message, and whether they hold forged accounts."""
    dice = rng.random()
    if dice < 0.6:
        return None, False
    if dice < 0.8:
        return {"trace": msg_id}, False
    if dice < 0.9:
        return rng.choice((["a"], "text", 7, {})), False
    entry = rng.choice(
        (
            {"queue": queue, "msg_id": msg_id, "refunds": 10**30, "deaths": -4},
            {"queue": queue, "msg_id": msg_id, "refunds": "x", "deaths": 2, "deadlocks": True},
            {"queue": "other", "msg_id": msg_id, "deaths": 3},
            {"queue": queue, "msg_id": True},
            ["no object"],
        )
    )
    return {"x-supervisor": entry}, True


def _maybe(rng: Random, *values: float) -> float | None:
    return None if rng.random() < 0.5 else rng.choice(values)


def random_queue(rng: Random, name: str, mode: Mode) -> QueueSettings:
    """Settings of one queue, small numbers that meet their limits often."""
    max_tasks = _maybe(rng, 1, 3, 10)
    return QueueSettings(
        name=name,
        handler="app:handle",
        dead_letter_queue=f"{name}_dlq",
        mode=mode,
        concurrency=rng.choice((1, 1, 2, 3, 5)),
        standby=rng.choice((0, 0, 0, 1, 2)),
        visibility_timeout_s=rng.choice((1.0, 2.0, 5.0, 30.0)),
        soft_timeout_s=_maybe(rng, 0.5, 2.0),
        hard_timeout_s=_maybe(rng, 1.0, 3.0, 10.0),
        memory_limit_bytes=None if rng.random() < 0.5 else 1 << 28,
        max_tasks_per_child=None if max_tasks is None else int(max_tasks),
        max_child_age_s=_maybe(rng, 2.0, 10.0),
        claim_batch_size=rng.choice((1, 5, 100)),
        max_in_flight=rng.choice((None, None, 1, 3, 20)),
        polling_interval_s=rng.choice((0.5, 2.0, 5.0)),
        on_success=rng.choice(tuple(AckMode)),
        max_attempts=rng.choice((1, 2, 3, 5)),
        max_deaths=rng.choice((1, 2, 3)),
        retry=RetryPolicy(base_s=rng.choice((0.05, 1.0)), factor=2.0, max_s=5.0, jitter=rng.random() < 0.8),
    )


def random_settings(rng: Random, modes: list[Mode]) -> CoreSettings:
    """Settings of a supervisor with one queue a mode."""
    return CoreSettings(
        queues=tuple(random_queue(rng, f"{mode}_{n}", mode) for n, mode in enumerate(modes)),
        host="host",
        supervisor="supervisor",
        version="1",
        grace_s=rng.choice((0.5, 3.0, 10.0)),
        kill_after_s=rng.choice((1.0, 5.0)),
        max_held_bytes=rng.choice((64 << 20, 300)),
        statement_timeout_s=rng.choice((0.5, 5.0)),
        timing=Timing(
            ready_deadline_s=rng.choice((2.0, 10.0)),
            dispatch_deadline_s=rng.choice((0.5, 5.0)),
            permit_slack_s=2.0,
            commit_slack_s=0.0,
            term_step_s=rng.choice((0.2, 1.0)),
            cancel_kill_s=rng.choice((1.5, 5.0)),
            unkillable_s=rng.choice((1.0, 5.0)),
            exit_deadline_s=rng.choice((0.5, 5.0)),
            hold_limit_s=rng.choice((1.0, 5.0)),
            boot_backoff_max_s=5.0,
            park_retry_s=rng.choice((2.0, 20.0)),
            claim_backoff_max_s=3.0,
        ),
    )

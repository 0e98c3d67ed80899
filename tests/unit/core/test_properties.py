"""Properties of the small deciders: delays, wake-ups, pacing, restarts, envelopes; for any numbers."""

from __future__ import annotations

import json
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text import clean_text
from supervisor.core.envelope import build_envelope
from supervisor.core.pacing import Pacing
from supervisor.core.policy import retry_delay_ms
from supervisor.core.restarts import Restarts
from supervisor.core.settings import CoreSettings, RetryPolicy, Timing
from supervisor.core.types import DeadLetterReason, DeathCause, DeathFacts, ErrorInfo
from supervisor.core.wakeups import Wakeups

UNIFORM = st.floats(0.0, 1.0, exclude_max=True)
MAX_DELAY_MS = 9_007_199_254_740

policies = st.builds(
    RetryPolicy,
    base_s=st.floats(0.0, 1e9),
    factor=st.floats(0.0, 1e12),
    max_s=st.floats(0.0, MAX_DELAY_MS / 1000),
    jitter=st.booleans(),
)


# --- delays -----------------------------------------------------------------------------------------------------------


@given(policy=policies, attempt=st.integers(1, 10**9), dice=UNIFORM)
def test_a_delay_is_between_nothing_and_its_maximum(policy: RetryPolicy, attempt: int, dice: float) -> None:
    """Also where the power would overflow; never a number that the database could refuse."""
    delay_ms = retry_delay_ms(policy, attempt, lambda: dice)
    assert 0 <= delay_ms <= min(MAX_DELAY_MS, policy.max_s * 1000)


@given(base_s=st.floats(0.001, 10.0), factor=st.floats(1.0, 10.0), attempt=st.integers(1, 80), dice=UNIFORM)
def test_delays_grow_up_to_their_maximum(base_s: float, factor: float, attempt: int, dice: float) -> None:
    """Exponential; jitter takes away at most a half."""
    plain = RetryPolicy(base_s=base_s, factor=factor, max_s=600.0, jitter=False)
    this, after = (retry_delay_ms(plain, n, lambda: dice) for n in (attempt, attempt + 1))
    assert this <= after
    jittered = RetryPolicy(base_s=base_s, factor=factor, max_s=600.0, jitter=True)
    assert this / 2 - 1 <= retry_delay_ms(jittered, attempt, lambda: dice) <= this


def test_the_default_delays() -> None:
    """1 s, 2 s, 4 s ... 10 min."""
    policy = RetryPolicy(jitter=False)
    assert [retry_delay_ms(policy, n, lambda: 0.0) for n in (1, 2, 3, 10, 11, 99)] == [
        1_000,
        2_000,
        4_000,
        512_000,
        600_000,
        600_000,
    ]


# --- wake-ups ---------------------------------------------------------------------------------------------------------

happenings = st.lists(
    st.tuples(
        st.sampled_from(("notified", "found", "nothing", "expect", "passed")), st.floats(0.0, 20.0), st.booleans()
    ),
    max_size=40,
)


@given(interval_s=st.floats(0.1, 60.0), story=happenings, dice=UNIFORM)
def test_a_queue_is_never_left_unread_for_longer_than_its_polling_interval(
    interval_s: float, story: list[tuple[str, float, bool]], dice: float
) -> None:
    """Whatever is notified or found: hungry now, or a deadline within the interval and its jitter."""
    wakeups, now = Wakeups(interval_s, Timing(), lambda: dice), 100.0
    for what, delay_s, flag in story:
        now += delay_s
        if wakeups.next_deadline() <= now:  # its owner keeps the deadlines
            wakeups.passed(now)
        match what:
            case "notified":
                wakeups.notified(now, reading=flag)
                assert wakeups.hungry
            case "found":
                wakeups.found()
            case "nothing" if wakeups.hungry:
                wakeups.found_nothing(now, delay_s if flag else None)
            case "expect":
                wakeups.expect(now + delay_s)
            case _:
                wakeups.passed(now)
        assert wakeups.hungry or wakeups.next_deadline() <= now + interval_s * 1.2 + 1e-6
        assert wakeups.hungry is (wakeups.next_deadline() == inf)


@given(delay_s=st.floats(0.0, 50.0), earlier_s=st.floats(0.0, 50.0))
def test_what_is_expected_is_read_in_time(delay_s: float, earlier_s: float) -> None:
    """An empty read that was made before it was committed does not put it off."""
    wakeups = Wakeups(60.0, Timing(), lambda: 0.5)
    wakeups.expect(100.0 + delay_s)
    wakeups.found_nothing(100.0, earlier_s)
    assert wakeups.next_deadline() <= 100.0 + min(delay_s, earlier_s) + 0.0011


# --- pacing -----------------------------------------------------------------------------------------------------------


@given(
    times=st.lists(st.floats(0.0, 5_000.0), max_size=60),
    children=st.integers(0, 64),
    most=st.none() | st.integers(1, 5_000),
)
def test_what_is_held_ahead_is_bounded(times: list[float], children: int, most: int | None) -> None:
    """By max_in_flight, by the work that it is, and by nothing measured."""
    pacing = Pacing(0.05, most, 4)
    assert pacing.ahead(children) == 0
    for seconds in times:
        pacing.measured(seconds)
        ahead = pacing.ahead(children)
        assert 0 <= ahead <= pacing.max_in_flight
        assert pacing.estimate_s is not None
        assert min(times) <= pacing.estimate_s <= max(times)
        assert ahead == 0 or pacing.estimate_s < 0.05
    pacing.turned_slow(5.0)
    assert pacing.ahead(children) == 0


@given(before=st.floats(1e-5, 0.04))
def test_slow_work_counts_at_once(before: float) -> None:
    """Fast messages held ahead while every child has a long one starve other hosts."""
    pacing = Pacing(0.05, None, 4)
    pacing.measured(before)
    pacing.measured(1200.0)
    assert pacing.ahead(4) == 0


# --- restarts ---------------------------------------------------------------------------------------------------------

ends = st.lists(
    st.tuples(st.sampled_from(("failed", "killed", "succeeded")), st.floats(0.0, 100.0), st.booleans(), st.booleans()),
    max_size=60,
)


@given(story=ends, dice=UNIFORM)
def test_starts_are_never_put_off_for_longer_than_a_parking(
    story: list[tuple[str, float, bool, bool]], dice: float
) -> None:
    """And children that work keep a queue from being parked."""
    timing = Timing()
    restarts, now = Restarts(timing, lambda: dice), 100.0
    for what, pause_s, definite, others_ready in story:
        now += pause_s
        if what == "succeeded":
            restarts.succeeded()
            assert restarts.parked is None
            assert restarts.not_before <= now
            continue
        parked = restarts.parked
        delay_s = restarts.failed(
            now,
            "why",
            spawned_at=now,
            definite=definite,
            from_outside=what == "killed",
            others_ready=others_ready,
        )
        assert 0.0 <= delay_s <= timing.park_retry_s * 1.25
        assert delay_s == 0.0 or restarts.not_before == pytest.approx(now + delay_s)
        assert not (others_ready and restarts.parked is not None and parked is None)


def test_only_failures_that_come_close_together_park_a_queue() -> None:
    """Intensity: 8 within 60 s."""
    timing = Timing(boot_intensity=8, boot_period_s=60.0)
    for gap_s, parks in ((1.0, True), (60.0, False)):
        restarts, now = Restarts(timing, lambda: 0.5), 100.0
        for _ in range(8):
            now += gap_s
            fail(restarts, now)
            restarts.consecutive = 0
        assert (restarts.parked is not None) is parks


def fail(restarts: Restarts, now: float, *, spawned_at: float | None = None, from_outside: bool = False) -> float:
    """An idle child ends; nothing else runs."""
    return restarts.failed(
        now,
        "an idle child ended",
        spawned_at=now - 0.1 if spawned_at is None else spawned_at,
        definite=False,
        from_outside=from_outside,
        others_ready=False,
    )


def test_children_that_fall_together_are_one_failure() -> None:
    """A hundred that crash in the same second say one thing about their handler, and park nothing."""
    restarts = Restarts(Timing(), lambda: 0.5)
    for number in range(100):
        fail(restarts, 100.0 + number / 100, spawned_at=50.0)
    assert (restarts.parked, restarts.consecutive) == (None, 1)


def test_kills_from_outside_say_nothing_about_a_handler() -> None:
    """They delay the next start a little, never more than seconds, and park nothing."""
    restarts, now = Restarts(Timing(), lambda: 0.5), 100.0
    for _ in range(100):
        now += 0.2
        assert fail(restarts, now, from_outside=True) <= 2.0
        now = max(now, restarts.not_before)
    assert restarts.parked is None


# --- envelopes --------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=()), max_size=30)


@given(type_=texts, message=texts, traceback=texts, stack=texts, cpu_s=st.floats(0.0, 1e6), code=st.integers(0, 255))
def test_an_envelope_can_always_be_stored(
    type_: str, message: str, traceback: str, stack: str, cpu_s: float, code: int
) -> None:
    """PostgreSQL's jsonb takes neither NUL nor lone surrogates nor infinities."""
    settings = CoreSettings(queues=(), host="host", supervisor="me", version="1")
    text = build_envelope(
        settings,
        reason=DeadLetterReason.DIED,
        queue="q",
        msg_id=1,
        attempt=1,
        deliveries=1,
        deaths=1,
        error=ErrorInfo(type_, message, traceback),
        death=(DeathCause.EXIT, DeathFacts(code, None, 1, cpu_s, stack, stack)),
    )
    text.encode()
    document = json.loads(text, parse_constant=lambda name: name)
    assert "\\u0000" not in text
    assert document["error"]["message"] == clean_text(message)
    assert isfinite(document["death"]["cpu_s"])
    assert not any("\ud800" <= character <= "\udfff" for character in json.dumps(document, ensure_ascii=False))

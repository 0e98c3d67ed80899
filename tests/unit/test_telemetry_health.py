"""Liveness and readiness, the sampler, the renderer and the status document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping

import pytest
from prometheus_client.core import CounterMetricFamily, Metric

from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.settings import QueueSettings
from supervisor.core.snapshot import ChildSnapshot, QueueSnapshot, Snapshot
from supervisor.telemetry.counts import QueueCounts
from supervisor.telemetry.health import Health, longest_attempt_s, unready
from supervisor.telemetry.metrics import MetricsSink
from supervisor.telemetry.render import Renderer
from supervisor.telemetry.sampler import Sampler
from supervisor.telemetry.status import Identity, status_document, status_line
from tests.unit.core.stage import ERROR, Q, Stage, queue, transactional

ATTEMPT_S = 80.0


def child(state: str = "idle", **changes: object) -> ChildSnapshot:
    """A child."""
    values: dict[str, object] = {
        "child": 1, "slot": 0, "incarnation": 1, "role": "active", "state": state, "pid": 7, "since": 0.0,
        "messages": 0, "msg_id": None, "attempt": None, "running_since": None, "stop_reason": None, "progress": None,
        "tree_bytes": None,
    }  # fmt: skip
    return ChildSnapshot(**(values | changes))  # type: ignore[arg-type]


def snapshot(*, now: float = 100.0, state: str = "running", **changes: object) -> Snapshot:
    """A supervisor of one queue."""
    values: dict[str, object] = {
        "queue": "orders", "mode": "regular", "handler": "a:b", "concurrency": 1, "paused": False, "parked": None,
        "waiting": 0, "in_flight": 0, "settling": 0, "owed": 0, "held_bytes": 0, "claims_attempted_at": now,
        "database_error": None, "listener_up": True, "lease_margin_s": None, "overdue_renewals": 0,
        "handler_ewma_s": None, "children": (child(),),
    }  # fmt: skip
    queue = QueueSnapshot(**(values | changes))  # type: ignore[arg-type]
    return Snapshot(state=state, now=now, started_at=0.0, reloading=False, queues=(queue,))


def reasons(*, seconds: int, heartbeat: bool = True, attempts: list[int] | None = None, **changes: object) -> list[str]:
    """Look once a second at a queue in this condition; what is said at the end."""
    tried = attempts if attempts is not None else [0]
    health = Health(polling_s={"orders": 5.0}, settle_attempts=lambda _: tried[-1], attempt_s=ATTEMPT_S)
    said: list[str] = []
    for second in range(seconds + 1):
        now = 100.0 + second
        heartbeat_at = now if heartbeat else 100.0
        condition = {"claims_attempted_at": now, **changes}
        said = health.observe(snapshot(now=now, **condition), heartbeat_at=heartbeat_at, now=now)
    return said


class TestLiveness:
    def test_a_working_supervisor_is_live(self) -> None:
        """Claims each second, nothing overdue."""
        assert reasons(seconds=600) == []

    def test_a_driver_that_stands_still_is_not(self) -> None:
        """The loop answers HTTP, but nothing is driven."""
        assert "driver" in reasons(seconds=11, heartbeat=False)[0]

    def test_a_claim_that_hangs_is_found_in_bounded_time(self) -> None:
        """Idle children and no attempt for two polling intervals and the longest attempt, to the second."""
        assert reasons(seconds=90, claims_attempted_at=100.0) == []
        assert "nothing was claimed" in reasons(seconds=91, claims_attempted_at=100.0)[0]
        assert "nothing was claimed" in reasons(seconds=91, claims_attempted_at=None)[0]

    def test_busy_children_excuse_a_missing_claim(self) -> None:
        """Who runs a message for 20 minutes has no reason to claim."""
        assert reasons(seconds=1200, claims_attempted_at=100.0, children=(child("busy"),)) == []

    def test_a_paused_queue_claims_nothing_and_lives(self) -> None:
        """So does a parked one."""
        assert reasons(seconds=600, claims_attempted_at=100.0, paused=True) == []
        assert reasons(seconds=600, claims_attempted_at=100.0, parked="import") == []

    def test_a_child_that_was_busy_for_long_gets_its_time_to_claim(self) -> None:
        """The age of the last attempt counts from when a child became idle."""
        health = Health(polling_s={"orders": 5.0}, settle_attempts=lambda _: 0, attempt_s=ATTEMPT_S)
        for now in range(100, 2000):
            busy = snapshot(now=float(now), claims_attempted_at=100.0, children=(child("busy"),))
            health.observe(busy, heartbeat_at=None, now=float(now))
        idle = snapshot(now=2001.0, claims_attempted_at=100.0)
        assert health.observe(idle, heartbeat_at=None, now=2001.0) == []

    def test_overdue_renewals_are_reported_when_they_stay(self) -> None:
        """A renewal may be late for a moment."""
        assert reasons(seconds=4, overdue_renewals=3) == []
        assert "3 leases" in reasons(seconds=7, overdue_renewals=3)[0]

    def test_overdue_renewals_are_counted_from_their_beginning(self) -> None:
        """Five seconds in one piece, to the second; a renewal that comes through in between begins it anew."""
        assert reasons(seconds=5, overdue_renewals=1) == []
        assert len(reasons(seconds=6, overdue_renewals=1)) == 1
        health = Health(polling_s={}, settle_attempts=lambda _: 0, attempt_s=ATTEMPT_S)
        for second in range(600):
            late = snapshot(now=float(second), claims_attempted_at=float(second), overdue_renewals=int(second % 6 != 5))
            assert health.observe(late, heartbeat_at=None, now=float(second)) == []

    def test_settlements_that_nobody_tries_are_reported(self) -> None:
        """Verdicts stand, and neither success nor failure was heard for the longest attempt, to the second."""
        assert reasons(seconds=80, settling=1) == []
        assert "no settlement" in reasons(seconds=81, settling=1)[0]

    def test_settlements_that_fail_are_attempts(self) -> None:
        """A database that refuses each of them, for an hour."""
        tried = [0]
        health = Health(polling_s={"orders": 5.0}, settle_attempts=lambda _: tried[0], attempt_s=ATTEMPT_S)
        for second in range(3600):
            now = 100.0 + second
            tried[0] += second % 79 == 0
            look = snapshot(now=now, settling=3, claims_attempted_at=now, database_error="refused")
            assert health.observe(look, heartbeat_at=now, now=now) == []

    @pytest.mark.parametrize("age_s", [10.0, 10.1])
    def test_the_heartbeat_has_ten_seconds(self, age_s: float) -> None:
        """The driver turns each second; nothing is said before it has begun."""
        health = Health(polling_s={}, settle_attempts=lambda _: 0, attempt_s=ATTEMPT_S)
        assert bool(health.observe(snapshot(), heartbeat_at=100.0 - age_s, now=100.0)) is (age_s > 10)
        assert health.observe(snapshot(), heartbeat_at=None, now=100.0) == []

    def test_a_database_that_is_away_is_not_our_death(self) -> None:
        """Attempts go on: a restart would not help."""
        assert reasons(seconds=600, database_error="refused") == []

    @pytest.mark.parametrize(
        "excuse",
        [
            {"paused": True},
            {"parked": "its module cannot be imported"},
            {"state": "draining"},
            {"state": "killing"},
            {"state": "starting"},
            {"waiting": 3},
            {"children": ()},
            {"children": (child("busy"), child("starting"), child("killed"), child("reserved"))},
        ],
        ids=str,
    )
    def test_who_may_not_claim_is_not_asked_why_not(self, excuse: dict[str, object]) -> None:
        """For an hour without a claim; and afterwards the time begins anew."""
        health = Health(polling_s={"orders": 5.0}, settle_attempts=lambda _: 0, attempt_s=ATTEMPT_S)
        for second in range(3600):
            look = snapshot(now=float(second), **{"claims_attempted_at": 0.0, **excuse})  # type: ignore[arg-type]
            assert health.observe(look, heartbeat_at=None, now=float(second)) == []
        for second in range(3600, 3691):
            look = snapshot(now=float(second), claims_attempted_at=0.0)
            assert health.observe(look, heartbeat_at=None, now=float(second)) == []
        assert health.observe(snapshot(claims_attempted_at=0.0), heartbeat_at=None, now=3691.0)

    def test_the_longest_attempt_follows_the_configuration(self) -> None:
        """Whatever an attempt may take by its own limits, a look does not take it for a stop before."""
        usual = {"acquire_s": 30.0, "connect_s": 10.0, "statement_s": 30.0, "permit_s": 70.0}
        assert longest_attempt_s(**usual) == 85.0
        assert longest_attempt_s(**{**usual, "acquire_s": 300.0}) == 355.0
        assert longest_attempt_s(**{**usual, "statement_s": 600.0, "permit_s": 1210.0}) == 1225.0
        assert longest_attempt_s(acquire_s=1.0, connect_s=1.0, statement_s=1.0, permit_s=12.0) == 27.0


class TestLivenessOfTheCore:
    """The core's own snapshots, in conditions that last."""

    @staticmethod
    def look_on(stage: Stage, seconds: int, each_second: Callable[[], None]) -> list[str]:
        """Let time pass, look once a second; all that was ever said."""
        health = Health(polling_s={"q": 5.0}, settle_attempts=lambda _: 0, attempt_s=85.0)
        said: list[str] = []
        for _ in range(seconds):
            stage.wait(1.0)
            each_second()
            said += health.observe(stage.core.snapshot(stage.now), heartbeat_at=stage.now, now=stage.now)
        return said

    @pytest.mark.parametrize("answer_s", [1, 30])
    def test_claims_that_fail_are_attempts(self, answer_s: int) -> None:
        """The database is away for an hour, and each claim waits for its limit."""
        stage = Stage().start()
        asked = [0]

        def fail() -> None:
            asked[0] += 1
            if stage.claiming is not None and asked[0] % answer_s == 0:
                stage.fail_claim()

        assert self.look_on(stage, 3600, fail) == []

    def test_permits_that_fail_are_attempts(self) -> None:
        """The same in transactional mode, where one child tries and the others are idle."""
        stage = Stage(transactional(concurrency=3)).start()
        grants = stage.all(c.GrantPermit)

        def fail() -> None:
            grants.extend(stage.all(c.GrantPermit))
            while grants:
                grant = grants.pop()
                stage.tell(
                    e.TransactionEnded(grant.child, grant.claim_id, ERROR, "08006", in_doubt=False, claimed=False)
                )
                grants.extend(stage.all(c.GrantPermit))

        assert self.look_on(stage, 3600, fail) == []

    def test_an_idle_queue_is_live(self) -> None:
        """Polled, and nothing is there."""
        stage = Stage().start()

        def answer() -> None:
            if stage.claiming is not None:
                stage.give()

        assert self.look_on(stage, 3600, answer) == []

    @pytest.mark.parametrize("settings", [queue(), transactional()], ids=["regular", "transactional"])
    def test_a_paused_queue_is_live(self, settings: QueueSettings) -> None:
        """For an hour."""
        stage = Stage(settings).start()
        for grant in stage.all(c.GrantPermit):
            stage.tell(e.PermitEmpty(grant.child, grant.claim_id, None))
        if stage.claiming is not None:
            stage.give()
        stage.tell(e.PauseChanged(Q, True))
        assert self.look_on(stage, 3600, lambda: None) == []

    def test_a_claim_that_never_ends_is_not_live(self) -> None:
        """Neither an answer nor a failure, which no limit of ours allows."""
        stage = Stage().start()
        assert stage.claiming is not None
        said = self.look_on(stage, 200, lambda: None)
        assert said
        assert "nothing was claimed" in said[0]


class TestReadiness:
    def test_every_queue_must_be_ready(self) -> None:
        """The reason names the queue."""
        assert unready(snapshot()) == {}
        assert unready(snapshot(database_error="refused")) == {"orders": "database: refused"}
        assert unready(snapshot(children=())) == {"orders": "0 of 1 children are ready"}

    def test_before_the_start_and_after_the_end_nothing_is_ready(self) -> None:
        """A load balancer sees the drain."""
        assert unready(None) == {"": "starting"}
        assert unready(snapshot(state="draining")) == {"": "draining"}


class TestStatus:
    def test_the_document_is_plain_and_complete(self) -> None:
        """It survives JSON, and has the queues by name."""
        running = child("busy", msg_id=5, attempt=2, running_since=90.0)
        document = status_document(
            snapshot(children=(running,)), identity=Identity(host="h", supervisor="s", version="1"),
            metrics=MetricsSink(["orders"]), counts={"orders": QueueCounts(visible=9, oldest_visible_s=1.5)},
            deaths=[], not_live=[], at=5.0,
        )  # fmt: skip
        read = json.loads(json.dumps(document))
        assert read["ready"] is True
        queue = read["queues"]["orders"]
        assert (queue["visible"], queue["oldest_visible_s"]) == (9, 1.5)
        assert queue["children"][0]["running_s"] == 10.0

    def test_the_document_exists_before_the_core(self) -> None:
        """A supervisor that waits for a standby can be asked."""
        document = status_document(
            None, identity=Identity(host="h", supervisor="s", version="1"), metrics=MetricsSink([]), counts={},
            deaths=[], not_live=[], at=5.0,
        )  # fmt: skip
        assert (document["state"], document["ready"], document["queues"]) == ("starting", False, {})

    def test_the_line_is_one_line(self) -> None:
        """What USR1 logs."""
        line = status_line(snapshot(paused=True), MetricsSink(["orders"]))
        assert "orders: PAUSED" in line
        assert "\n" not in line


class TestSampler:
    async def test_a_sample_grows_old_and_disappears(self) -> None:
        """An old depth is no depth."""
        now = [0.0]

        async def sample() -> Mapping[str, QueueCounts]:
            return {"orders": QueueCounts(visible=3, oldest_visible_s=None)}

        sampler = Sampler(sample, clock=lambda: now[0], every_s=10.0)
        await sampler.sample_once()
        assert sampler.latest()["orders"].visible == 3
        now[0] = 41.0
        assert sampler.latest() == {}

    async def test_a_failure_is_kept_and_raises_nothing(self) -> None:
        """The gauges end, the supervisor does not."""

        async def sample() -> Mapping[str, QueueCounts]:
            raise OSError("away")

        sampler = Sampler(sample, clock=lambda: 0.0)
        await sampler.sample_once()
        assert sampler.error == "OSError: away"
        assert sampler.latest() == {}


class Counting:
    """Our collector, counting how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> list[Metric]:
        """One family."""
        self.asked += 1
        return [CounterMetricFamily("ours", "Help.", value=self.asked)]


class TestRenderer:
    async def test_many_who_ask_at_once_cost_one_rendering(self) -> None:
        """A hundred scrapes a second are not a hundred renderings."""
        ours = Counting()
        renderer = Renderer(ours, None)
        await asyncio.gather(*(renderer.render(as_openmetrics=False) for _ in range(100)))
        assert ours.asked == 1

    async def test_what_is_old_is_rendered_again(self) -> None:
        """After a fraction of a second the numbers are new."""
        now = [0.0]
        renderer = Renderer(Counting(), None, clock=lambda: now[0])
        assert b"ours_total 1.0" in (await renderer.render(as_openmetrics=False)).body
        now[0] = 60.0
        assert b"ours_total 2.0" in (await renderer.render(as_openmetrics=False)).body

    async def test_a_handlers_metrics_that_fail_leave_ours(self) -> None:
        """Whatever they are named and labelled."""

        class Failing:
            def collect(self) -> list[Metric]:
                raise RuntimeError("no")

        renderer = Renderer(Counting(), Failing())
        assert b"ours_total" in (await renderer.render(as_openmetrics=True)).body

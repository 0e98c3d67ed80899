"""A supervisor's shell in the simulated world: it carries commands out, and gives every answer exactly once.

Three things can happen to its process: it ends by itself (`Exit`), it is killed, or it stands still for a while and
then goes on, when all that it should have heard meanwhile comes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from shared.pgmq.records import Ack, ClaimedRow, ReckonOutcome, SettleFailure, SettleItem, SettleOutcome, SettleResult
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.core import Core, CoreState
from supervisor.core.settings import CoreSettings
from supervisor.core.types import ChildId, QueueName
from tests.simulation.children import FakeChild
from tests.simulation.choices import KILLED
from tests.simulation.invariants import check_core
from tests.simulation.ledger import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

_MAX_STEPS_AT_ONCE = 25  # calls for a deadline that has come, at one moment
_MAX_WAKES_PER_S = 150
_MAX_COMMANDS = 600
_STOOD_STILL_S = 2.0  # as the driver has it


class Shell:
    def __init__(self, world: World, name: str, settings: CoreSettings) -> None:
        self.world = world
        self.name = name
        self.settings = settings
        self.core = Core(settings, Random(world.rng.random()).random)
        self.children: dict[ChildId, FakeChild] = {}
        self.alive = True
        self.exit_code: int | None = None
        self.frozen = False
        self.drain_asked_at: float | None = None
        self.frozen_s = 0.0  # in its whole life
        self._backlog: list[e.Event] = []
        self._wake_at: float | None = None
        self._still = (0.0, 0)
        self._second = (0, 0)
        self._settle_queue: dict[QueueName, list[SettleItem]] = {}
        self._open: set[tuple[str, object]] = set()
        self._too_late: set[tuple[str, int]] = set()  # what finished after the grace period
        self._modes = {queue.name: queue for queue in settings.queues}
        self._carry_out: dict[type, Callable[[Any], None]] = {
            c.Claim: self._claim,
            c.FetchBody: self._fetch_body,
            c.Renew: self._renew,
            c.Settle: self._settle,
            c.Reckon: self._reckon,
            c.TerminateBackend: self._terminate_backend,
            c.StartChild: self._start_child,
            c.Dispatch: self._dispatch,
            c.GuardLeases: self._guard_leases,
            c.SendStop: self._send_stop,
            c.SendTerm: lambda _command: None,  # a no-op handler in the child
            c.SendExit: self._send_exit,
            c.KillChild: self._kill_child,
            c.AbandonChild: lambda _command: None,
            c.GrantPermit: self._grant_permit,
            c.AnswerClaim: self._answer_claim,
            c.AnswerCommit: self._answer_commit,
            c.Exit: self._exit,
        }

    # --- the loop ---------------------------------------------------------------------------------------------------

    def hear(self, event: e.Event) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(event)
            return
        self._step(event)

    def _step(self, event: e.Event) -> None:
        world, now = self.world, self.world.timeline.now
        if type(event) is e.MessageFinished and self.core._state is CoreState.KILLING:
            self._too_late.add((self._queue_of(event.child), event.claim_id))
        commands = self.core.handle(event, now)
        world.story.add(now, self.name, event, commands)
        if len(commands) > _MAX_COMMANDS:
            raise Violation("a step is bounded", f"{len(commands)} commands after {event}")
        for command in commands:
            self._carry_out.get(type(command), self._told)(command)
        if self.alive:
            check_core(self.core, now)
            self._arm()

    def _queue_of(self, child: ChildId) -> str:
        return self.children[child].queue.name

    def _arm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline == inf:
            return
        when = max(deadline, self.world.timeline.now)
        if self.world.faults.hit("loop.lag"):
            when += self.world.rng.uniform(0.001, 0.05)
        if self._wake_at is None or when < self._wake_at:
            self._wake_at = when
            self.world.timeline.at(when, self._wake, when)

    def _wake(self, when: float) -> None:
        if self._wake_at != when:
            return
        self._wake_at = None
        if not self.alive or self.frozen:
            return
        if self.core.next_deadline() > when:
            self._arm()
            return
        self._count_wake(when)
        self._step(e.TimePassed())

    def _count_wake(self, now: float) -> None:
        """No busy loop: a deadline that has come must go away when it is told."""
        at, count = self._still
        self._still = (now, count + 1 if now == at else 1)
        if self._still[1] > _MAX_STEPS_AT_ONCE:
            raise Violation(
                "deadlines pass", f"{self._still[1]} steps at one moment, deadline {self.core.next_deadline()}"
            )
        second, count = self._second
        self._second = (int(now), count + 1 if int(now) == second else 1)
        if self._second[1] > _MAX_WAKES_PER_S:
            raise Violation("no busy loop", f"{self._second[1]} wakes within a second")

    def freeze(self, duration_s: float) -> None:
        if self.frozen:
            return
        self.frozen = True
        self.frozen_s += duration_s
        self.world.timeline.after(duration_s, self._thaw, duration_s)

    def _thaw(self, duration_s: float) -> None:
        self.frozen = False
        if not self.alive:
            return
        backlog, self._backlog = self._backlog, []
        if duration_s > _STOOD_STILL_S:
            self._step(e.StoodStill(duration_s))
        if self.world.rng.random() < 0.5:
            self._step(e.TimePassed())
        for event in backlog:
            self.hear(event)
        self._arm()

    def kill(self) -> None:
        """SIGKILL: nothing of it goes on but what it had sent; the guard ends its children."""
        self.alive = False
        for child in self.children.values():
            child.killed = True
            self.world.timeline.after(self.world.rng.uniform(0.001, 0.02), child.die, KILLED)

    # --- database ---------------------------------------------------------------------------------------------------

    def _ask(
        self,
        site: str,
        work: Callable[[], T],
        answer: Callable[[T], e.Event],
        failed: Callable[[str], e.Event],
        timeout_s: float = 4.0,
    ) -> None:
        """One statement: it happens or not, and one event says so or not."""
        world = self.world
        hit, rng, timeline = world.faults.hit, world.rng, world.timeline
        slow = hit("db.slow") or (site == "fetch" and hit("fetch.slow"))
        takes_s = rng.uniform(0.05, 6.0) if slow else rng.uniform(0.0003, 0.003)
        if world.database_down or hit(site + ".refused"):
            refused_s = min(timeout_s, rng.choice((0.001, 0.05, 2.0)))
            timeline.after(refused_s, self._hear_failed, failed, "refused")
            return
        begins_s = rng.random() * takes_s
        lost = hit(site + ".lost")
        if takes_s > timeout_s:
            lost, takes_s = True, timeout_s
            if begins_s > timeout_s:
                timeline.after(timeout_s, self._hear_failed, failed, "timeout")
                return
        timeline.after(begins_s, self._carry, work, answer, failed, takes_s - begins_s, lost)

    def _hear_failed(self, failed: Callable[[str], e.Event], error: str) -> None:
        if self.alive:
            self.hear(failed(error))

    def _hear_answer(self, answer: Callable[[T], e.Event], result: T) -> None:
        if self.alive:
            self.hear(answer(result))

    def _carry(
        self,
        work: Callable[[], T],
        answer: Callable[[T], e.Event],
        failed: Callable[[str], e.Event],
        rest_s: float,
        lost: bool,
    ) -> None:
        timeline = self.world.timeline
        if self.world.database_down:
            timeline.after(rest_s, self._hear_failed, failed, "server closed the connection")
            return
        result = work()
        if lost:
            timeline.after(rest_s, self._hear_failed, failed, "connection lost")
        else:
            timeline.after(rest_s, self._hear_answer, answer, result)

    def _begin(self, kind: str, key: object) -> None:
        if (kind, key) in self._open:
            raise Violation("one question at a time", f"{kind} {key}")
        self._open.add((kind, key))

    def _end(self, kind: str, key: object, event: e.Event) -> e.Event:
        self._open.discard((kind, key))
        return event

    def _claim(self, command: c.Claim) -> None:
        queue, name, asked_at = self.world.queues[command.queue], command.queue, self.world.timeline.now
        place = (name, 2 if ("claim", (name, 1)) in self._open else 1)
        self._begin("claim", place)
        if len(self._open & {("claim", (name, 1)), ("claim", (name, 2))}) > min(2, self._modes[name].concurrency):
            raise Violation("claims overlap only where there are several children", f"{command}")

        def take() -> tuple[tuple[ClaimedRow, ...], float | None]:
            found = queue.claim(command.limit, command.lease_s, command.byte_budget)
            for row in found[0]:
                self.world.ledger.claimed(name, row.fence.msg_id, self)
            return found

        self._ask(
            "claim",
            take,
            lambda got: self._end(
                "claim", place, e.Claimed(name, command.limit, asked_at, *got, full=len(got[0]) == command.limit)
            ),
            lambda error: self._end("claim", place, e.ClaimFailed(name, error)),
        )

    def _fetch_body(self, command: c.FetchBody) -> None:
        queue, name, claim_id = self.world.queues[command.queue], command.queue, command.claim_id
        self._ask(
            "fetch",
            lambda: queue.fetch_body(command.fence),
            lambda got: e.BodyFetched(name, claim_id, got[0], got[1]),
            lambda error: e.BodyFetchFailed(name, claim_id, error),
        )

    def _renew(self, command: c.Renew) -> None:
        queue, name, asked_at = self.world.queues[command.queue], command.queue, self.world.timeline.now
        self._begin("renew", name)
        self._ask(
            "renew",
            lambda: queue.renew(command.fences, command.lease_s),
            lambda got: self._end("renew", name, e.Renewed(name, asked_at, got)),
            lambda error: self._end("renew", name, e.RenewFailed(name, error)),
            command.timeout_s,
        )

    def _settle(self, command: c.Settle) -> None:
        """Batched naturally: what comes within a millisecond goes together."""
        waiting = self._settle_queue.setdefault(command.queue, [])
        if not waiting:
            self.world.timeline.after(self.world.rng.random() * 0.002, self._send_settlements, command.queue)
        for item in command.items:
            self._begin("settle", item.claim_id)
            waiting.append(item)
            if isinstance(item.settlement, Ack) and (command.queue, item.claim_id) in self._too_late:
                raise Violation("nothing is acknowledged after the grace period", f"{command}")

    def _send_settlements(self, name: QueueName) -> None:
        items = self._settle_queue.pop(name)
        if not self.alive:
            return
        queue, hit = self.world.queues[name], self.world.faults.hit

        def settle_one(item: SettleItem) -> SettleResult:
            if hit("settle.item"):
                return SettleResult(item.claim_id, SettleOutcome.FAILED, "refused")
            if hit("settle.impossible"):
                return SettleResult(item.claim_id, SettleOutcome.FAILED, "impossible", SettleFailure.IMPOSSIBLE)
            return SettleResult(item.claim_id, queue.settle(self.name, item))

        def settle_all() -> list[SettleResult]:
            return [settle_one(item) for item in items]

        def told(results: list[SettleResult]) -> e.Event:
            for item in items:
                self._open.discard(("settle", item.claim_id))
            return e.Settled(name, tuple(results))

        def failed(error: str) -> e.Event:
            away = SettleFailure.AWAY
            return told([SettleResult(item.claim_id, SettleOutcome.FAILED, error, away) for item in items])

        self._ask("settle", settle_all, told, failed)

    def _reckon(self, command: c.Reckon) -> None:
        queue, name, claim_id = self.world.queues[command.queue], command.queue, command.claim_id
        xid = command.tx.xid if command.tx is not None else None
        self._begin("reckon", claim_id)
        failed = e.Reckoned(name, claim_id, ReckonOutcome.FAILED, "failed")

        def known(outcome: ReckonOutcome) -> bool | None:
            asked = outcome in (ReckonOutcome.GONE, ReckonOutcome.MOVED, ReckonOutcome.OURS)
            return queue.fates.get(xid) if asked and xid is not None else None

        self._ask(
            "reckon",
            lambda: queue.reckon(command.reckoning, xid),
            lambda outcome: self._end("reckon", claim_id, e.Reckoned(name, claim_id, outcome, None, known(outcome))),
            lambda _error: self._end("reckon", claim_id, failed),
        )

    def _terminate_backend(self, command: c.TerminateBackend) -> None:
        queue = self.world.queues[command.queue]

        def terminate() -> None:
            for transaction in list(queue.transactions):
                if transaction.xid == command.tx.xid:
                    queue.rollback(transaction)

        if self.world.rng.random() < 0.8:
            self.world.timeline.after(self.world.rng.uniform(0.001, 0.02), terminate)

    # --- children ---------------------------------------------------------------------------------------------------

    def _start_child(self, command: c.StartChild) -> None:
        if self.world.faults.hit("boot.spawn"):
            self.world.timeline.after(0.001, self.hear, e.SpawnFailed(command.child, "no memory"))
            return
        child = FakeChild(self, command.child, self._modes[command.queue])
        self.children[command.child] = child
        self.world.timeline.after(0.0005, self.hear, e.ChildSpawned(command.child, 1000 + command.child))
        child.boot()

    def _dispatch(self, command: c.Dispatch) -> None:
        child = self.children[command.child]
        row = child.queue.rows.get(command.msg_id)
        if command.attempt > child.settings.max_attempts:
            raise Violation("attempts within their limit", f"{command}")
        if row is not None and row.body != command.body and row.read_ct == command.deliveries:
            raise Violation("bodies arrive whole", f"{command}, {row.body!r}")
        child.dispatch(command)

    def _guard_leases(self, command: c.GuardLeases) -> None:
        for child_id, deadline in command.deadlines:
            child = self.children[child_id]
            if child.run is not None:
                child.guard(deadline)

    def _send_stop(self, command: c.SendStop) -> None:
        self.children[command.child].stop(command)

    def _send_exit(self, command: c.SendExit) -> None:
        self.children[command.child].exit()

    def _kill_child(self, command: c.KillChild) -> None:
        child = self.children.get(command.child)  # none when its spawn failed
        if child is not None:
            child.kill()

    def _grant_permit(self, command: c.GrantPermit) -> None:
        self.children[command.child].permit(command)

    def _answer_claim(self, command: c.AnswerClaim) -> None:
        self.children[command.child].may_go_on(command)

    def _answer_commit(self, command: c.AnswerCommit) -> None:
        self.children[command.child].answer(command)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _told(self, happening: h.Happening) -> None:
        if type(happening) is h.CommitInDoubt:
            self.world.ledger.message(happening.queue, happening.msg_id).doubtful = True
        elif type(happening) is h.MessageSucceeded:
            message = self.world.ledger.message(happening.queue, happening.msg_id)
            message.told_succeeded += 1
            if message.told_succeeded > message.acks and not message.doubtful:
                raise Violation("no success is claimed that the database did not confirm", f"{happening}")
        elif type(happening) is h.MessageDeadLettered:
            message = self.world.ledger.message(happening.queue, happening.msg_id)
            message.told_dead += 1
            if message.told_dead > message.dead and not message.doubtful:
                raise Violation("no dead letter is claimed that the database did not confirm", f"{happening}")

    def _exit(self, command: c.Exit) -> None:
        self.exit_code = command.code
        self.alive = False
        self.world.on_exit(self)
        for child in self.children.values():
            if child.alive and not child.killed:
                raise Violation("no child outlives its supervisor", f"{child} at exit {command.code}")

"""One story: a seed, its world, its faults, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from supervisor.core import events as e
from supervisor.core.core import CoreState
from supervisor.core.settings import CoreSettings
from supervisor.core.types import Mode, QueueName
from tests.simulation.choices import Nature, random_headers, random_natures, random_settings
from tests.simulation.database import Queue
from tests.simulation.faults import Faults
from tests.simulation.ledger import Ledger, Message, Violation
from tests.simulation.shell import Shell
from tests.simulation.story import Story
from tests.simulation.timeline import Timeline

_BEGIN: Final = 100_000.0
_PEACE_S: Final = 3_000.0  # the longest way of a message to its end, without faults
_THROTTLE_S: Final = 0.25
_SNAPSHOT_EVERY_S: Final = 1.7


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    number: int
    steps: int
    violation: str | None
    tail: tuple[str, ...] = ()


def tell_story(seed: int, *, tail: int = 60) -> Result:
    """Run one seed. Errors of the core itself count as violations."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - the boundary: whatever the core raises ends the story
        violation = f"{type(error).__name__}: {error}"
        return Result(seed, world.story.number, world.story.steps, violation, tuple(world.story.tail(tail)))
    return Result(seed, world.story.number, world.story.steps, None)


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.timeline = Timeline(_BEGIN)
        self.story = Story()
        self.ledger = Ledger()
        self.faults = Faults(rng)
        self.database_down = False
        self.code_broken = False
        self.natures: dict[tuple[str, int], Nature] = {}
        modes = rng.choice(
            (
                [Mode.REGULAR],
                [Mode.REGULAR],
                [Mode.TRANSACTIONAL],
                [Mode.TRANSACTIONAL],
                [Mode.REGULAR, Mode.TRANSACTIONAL],
            )
        )
        self.settings = random_settings(rng, modes)
        self.queues = {QueueName(q.name): Queue(q.name, self.timeline, self.ledger) for q in self.settings.queues}
        self.ledger.limits = {q.name: (q.max_attempts, q.max_deaths) for q in self.settings.queues}
        self.shells: list[Shell] = []
        self._wanted = rng.choice((1, 1, 2))  # supervisors
        permits = {q.name: q.concurrency * self._wanted for q in self.settings.queues if q.mode is Mode.TRANSACTIONAL}
        self.ledger.late_charges = {q.name: permits.get(q.name, 0) for q in self.settings.queues}
        self._born = 0
        self._xid = 0
        self._paused: set[QueueName] = set()
        self._mixture = random_natures(rng)
        self._large = rng.choice((0.0, 0.1, 0.8))  # part of the bodies that do not come with their claim
        self._peace = False
        self._closing = False
        self._notified_at: dict[str, float] = {}

    def next_xid(self) -> int:
        self._xid += 1
        return self._xid

    def _later(self, latest_s: float, action: Callable[..., None], *args: object) -> None:
        self.timeline.after(self.rng.uniform(0.0, latest_s), action, *args)

    def _note(self, what: str) -> None:
        self.story.note(self.timeline.now, what)

    # --- supervisors ------------------------------------------------------------------------------------------------

    def _living(self) -> list[Shell]:
        return [shell for shell in self.shells if shell.alive]

    def _new_settings(self) -> CoreSettings:
        return self.settings

    def _start_shell(self) -> None:
        if len(self._living()) >= self._wanted or self._closing:
            return
        self._born += 1
        shell = Shell(self, f"s{self._born}", self.settings)
        self._note(f"{shell.name} starts")
        self.shells.append(shell)
        shell.hear(e.Started())
        shell.hear(e.ListenerUp(tuple(self.queues)))
        for queue in self._paused:
            shell.hear(e.PauseChanged(queue, True))

    def on_exit(self, shell: Shell) -> None:
        """The invariants of an end; then, as a service manager would, a new one."""
        now, code = self.timeline.now, shell.exit_code
        self._note(f"{shell.name} exits with {code}")
        if code not in (0, 1, 3):
            raise Violation("exit codes", f"{code}")
        if shell.drain_asked_at is not None:
            took_s = now - shell.drain_asked_at - shell.frozen_s
            if took_s > shell.settings.grace_s + shell.settings.kill_after_s + 0.2:
                raise Violation("a stop ends in time", f"{shell.name} took {took_s:.3f} s")
        elif code != 1:
            raise Violation("nobody asked it to stop", f"{shell.name} exits with {code}")
        if not self._peace:
            self._later(2.0, self._start_shell)

    # --- producers --------------------------------------------------------------------------------------------------

    def _send(self, queue: Queue, natures: list[Nature]) -> None:
        for nature in natures:
            msg_id = queue._ids + 1
            headers, forged = random_headers(self.rng, queue.name, msg_id)
            self.ledger.messages[queue.name, msg_id] = Message(forged=forged)
            self.natures[queue.name, msg_id] = nature
            body = self.rng.choice((b"{}", b"x" * 100, b"y" * 250, None))
            delay_s = self.rng.choice((0.0, 0.0, 0.0, 0.5, 3.0))
            queue.send(headers, body, large=body is not None and self.rng.random() < self._large, delay_s=delay_s)
        self._notify(queue)

    def _notify(self, queue: Queue) -> None:
        """PGMQ's trigger: leading-edge throttling."""
        now = self.timeline.now
        if now - self._notified_at.get(queue.name, 0.0) < _THROTTLE_S:
            return
        self._notified_at[queue.name] = now
        for shell in self._living():
            if not self.faults.hit("notify.lost"):
                self.timeline.after(self.rng.uniform(0.0005, 0.01), shell.hear, e.Notified(QueueName(queue.name)))

    # --- nemesis ----------------------------------------------------------------------------------------------------

    def _database_outage(self) -> None:
        if self.database_down:
            return
        duration_s = self.rng.choice((0.1, 1.0, 8.0, 40.0))
        lost_s = self.rng.choice((0.0, 0.0, 0.3))
        self._note(f"the database is away for {duration_s} s and lost {lost_s} s")
        self.database_down = True
        for message in self.ledger.messages.values():
            message.ran_free = message.ran_free or bool(message.running) or bool(lost_s and message.claims)
        for queue in self.queues.values():
            for transaction in queue.transactions:
                self.ledger.message(queue.name, transaction.row.msg_id).ran_free = True
            queue.crash(lost_s)
        for shell in self._living():
            shell.hear(e.ListenerDown("server closed the connection"))
        self.timeline.after(duration_s, self._database_back)

    def _database_back(self) -> None:
        self.database_down = False
        for shell in self._living():
            shell.hear(e.ListenerUp(tuple(self.queues)))

    def _lock_rows(self) -> None:
        queue = self.rng.choice(list(self.queues.values()))
        for msg_id in self.rng.sample(sorted(queue.rows), min(len(queue.rows), 3)):
            unlock = queue.lock(msg_id)
            if unlock is not None:
                self._note(f"{queue.name}/{msg_id} is locked")
                self._later(6.0, unlock)

    def _purge(self) -> None:
        queue = self.rng.choice(list(self.queues.values()))
        self._note(f"{queue.name} is purged")
        queue.purge(list(queue.rows))

    def _lose_dlq(self) -> None:
        queue = self.rng.choice(list(self.queues.values()))
        queue.dlq_there = False
        self._note(f"the dead-letter queue of {queue.name} is gone")
        self._later(20.0, self._restore_dlq, queue)

    def _restore_dlq(self, queue: Queue) -> None:
        queue.dlq_there = True

    def _break_code(self) -> None:
        self.code_broken = True
        self._note("the handler cannot be imported")
        self._later(20.0, self._mend_code)

    def _mend_code(self) -> None:
        self.code_broken = False

    def _pause(self) -> None:
        queue = self.rng.choice(list(self.queues))
        paused = queue not in self._paused
        (self._paused.add if paused else self._paused.discard)(queue)
        for shell in self._living():
            shell.hear(e.PauseChanged(queue, paused))

    def _cancel(self) -> None:
        if not self.natures:
            return
        running = [key for key, message in self.ledger.messages.items() if message.running]
        queue, msg_id = self.rng.choice(running or list(self.natures))
        for shell in self._living():
            shell.hear(e.CancelRequested(QueueName(queue), msg_id))

    def _reload(self) -> None:
        for shell in self._living():
            shell.hear(e.ReloadRequested())

    def _freeze(self) -> None:
        for shell in self._living()[:1]:
            duration_s = self.rng.choice((0.1, 1.0, 5.0, 60.0))
            self._note(f"{shell.name} stands still for {duration_s} s")
            shell.freeze(duration_s)

    def _kill_shell(self) -> None:
        for shell in self._living()[:1]:
            self._note(f"{shell.name} is killed")
            shell.kill()
            self._later(2.0, self._start_shell)

    def _stop_shell(self, *, burst_s: float = 1.0) -> None:
        for shell in self._living()[:1]:
            self._stop(shell, burst_s)

    def _stop(self, shell: Shell, again_within_s: float) -> None:
        if shell.drain_asked_at is None:
            shell.drain_asked_at = self.timeline.now
        shell.hear(e.ShutdownRequested())
        if self.rng.random() < 0.3:
            self._later(again_within_s, shell.hear, e.EscalationRequested())

    # --- the story --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        rng = self.rng
        war_s = rng.choice((5.0, 15.0, 40.0))
        for _ in range(self._wanted):
            self._later(0.5, self._start_shell)
        for queue in self.queues.values():
            for _ in range(rng.randint(1, 4)):
                natures = [rng.choice(self._mixture) for _ in range(rng.randint(1, 10))]
                self._later(war_s * 0.6, self._send, queue, natures)
        nemesis: list[Callable[[], None]] = [
            self._database_outage,
            self._lock_rows,
            self._purge,
            self._lose_dlq,
            self._break_code,
            self._pause,
            self._cancel,
            self._cancel,
            self._reload,
            self._freeze,
            self._kill_shell,
            self._stop_shell,
        ]
        if rng.random() < 0.3:
            for queue in self.queues.values():
                queue.journal = []
        for action in rng.sample(nemesis, rng.randint(0, 6)) + self._theme():
            for _ in range(rng.randint(1, 6)):
                self._later(war_s, action)
        self.timeline.after(_SNAPSHOT_EVERY_S, self._look)
        end = _BEGIN + 0.5 + war_s
        self.timeline.run(end, lambda: False)
        self._make_peace()
        self._everything_ends()
        self._shut_down()

    def _theme(self) -> list[Callable[[], None]]:
        """Some stories are about what is seldom: large bodies, and children that never begin."""
        match self.rng.randrange(6):
            case 0:
                self._large = 1.0
                self.faults.favour(fetch_slow=0.9, child_idle_death=0.5, child_idle_protocol=0.5)
                return [self._purge, self._purge]
            case 1:
                self.faults.favour(child_dispatch_lost=0.3, child_late=0.4, child_unkillable=0.4)
                return [self._stop_shell]
            case _:
                return []

    def _look(self) -> None:
        """`snapshot()` works at any time."""
        for shell in self._living():
            for queue in shell.core.snapshot(self.timeline.now).queues:
                if not 0 <= queue.waiting <= queue.in_flight:
                    raise Violation("snapshots make sense", f"{queue}")
            for key in list(self.ledger.messages)[:3]:
                shell.core.holds(*key)
        if len(self.timeline) > 2_000:
            raise Violation("timers are bounded", f"{len(self.timeline)}")
        if not self._peace:
            self.timeline.after(_SNAPSHOT_EVERY_S, self._look)

    def _make_peace(self) -> None:
        self._note("peace")
        self._look()
        self._peace = True
        self.faults.end()
        self.code_broken = False
        if self.database_down:
            self._database_back()
        for queue in self.queues.values():
            queue.dlq_there = True
        for name in list(self._paused):
            self._paused.discard(name)
            for shell in self._living():
                shell.hear(e.PauseChanged(name, False))

    def _everything_ends(self) -> None:
        """Liveness: without faults every message is acked or dead-lettered, and the supervisors come to rest."""

        def ended() -> bool:
            if not self._living() or all(shell.drain_asked_at is not None for shell in self._living()):
                self._start_shell()
            return not any(queue.rows for queue in self.queues.values())

        if not self.timeline.run(self.timeline.now + _PEACE_S, ended):
            left = [row for queue in self.queues.values() for row in queue.rows.values()]
            raise Violation("every message ends", f"{len(left)} left: {left[:3]}")
        for (name, msg_id), message in self.ledger.messages.items():
            if not (message.acks or message.dead or message.purged):
                raise Violation("every message ends", f"{name}/{msg_id} vanished")
        if not self.timeline.run(self.timeline.now + 200.0, self._at_rest):
            raise Violation(
                "everything comes to rest", f"{[s.core.snapshot(self.timeline.now) for s in self._living()]}"
            )

    def _at_rest(self) -> bool:
        for shell in self._living():
            if shell.frozen:
                return False
            for machine in shell.core._queues.values():
                states = [str(child.state) for child in machine.pool.children.values()]
                if machine.open_work or states != ["idle"] * machine.pool.size:
                    return False
        return True

    def _shut_down(self) -> None:
        """A last burst, and a stop in the middle of it: what was not handled is visible at once and not charged."""
        burst = self.rng.random() < 0.7
        if burst:
            for queue in self.queues.values():
                kinds = (Nature.GOOD, Nature.GOOD, Nature.SLOW)
                self._send(queue, [self.rng.choice(kinds) for _ in range(self.rng.randint(1, 30))])
            until = self.timeline.now + self.rng.uniform(0.0, 0.5)
            self.timeline.run(until, lambda: False)
        self._closing = True
        stopped = self._living()
        for shell in stopped:
            self._stop(shell, 2.0)
        limit_s = self.settings.grace_s + self.settings.kill_after_s + 0.3
        if not self.timeline.run(self.timeline.now + limit_s, lambda: not self._living()):
            states = [(shell.name, shell.core._state) for shell in self._living()]
            raise Violation("a stop ends in time", f"{states}")
        if not burst and any(shell.exit_code for shell in stopped):
            raise Violation("a stop without work is clean", f"{[shell.exit_code for shell in stopped]}")
        self.timeline.run(self.timeline.now + 0.1, lambda: False)
        now_us = int(self.timeline.now * 1e6)
        for queue in self.queues.values():
            for row in queue.rows.values():
                message = self.ledger.message(queue.name, row.msg_id)
                # What was claimed unheard comes back after its lease: a former supervisor cannot give it back.
                unheard = message.unheard_by is not None and message.unheard_by not in stopped
                untouched = message.claims and not message.deaths and not message.ran_free and not unheard
                if (row.lock is not None and not message.ran_free) or (untouched and row.vt_us > now_us + 1000):
                    raise Violation("a stop gives back what it held", f"{row} at {now_us}")
                entry = json.loads(queue.accounts_of(row) or "{}")
                if (
                    not message.starts
                    and not message.forged
                    and row.read_ct > entry.get("refunds", 0) + message.unheard
                ):
                    raise Violation("what was not started is not charged", f"{row}")
        assert all(shell.core._state is CoreState.STOPPED for shell in stopped)

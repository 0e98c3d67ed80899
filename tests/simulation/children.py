"""Child processes: they boot, run what they are given, answer stop requests or not, and die at any moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from shared.pgmq.records import DeadLetter
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core.accounts import parse_accounts
from supervisor.core.settings import QueueSettings
from supervisor.core.types import ChildId, ClaimId, DeathFacts, ErrorInfo, Outcome, OutcomeKind, QueueName, TxIdentity
from tests.simulation.choices import KILLED, KILLED_BY_GUARD, Ending, Reaction, Script, facts, script
from tests.simulation.database import Transaction
from tests.simulation.ledger import Violation

if TYPE_CHECKING:
    from tests.simulation.shell import Shell

_STOPPED = Outcome(OutcomeKind.STOPPED)


def _sql_error(sqlstate: str) -> ErrorInfo:
    return ErrorInfo("DatabaseError", sqlstate, "")


@dataclass(slots=True, eq=False)
class Run:
    """One message in a child's hands, or in transactional mode a permit."""

    claim_id: ClaimId
    msg_id: int = 0
    script: Script | None = None
    started: bool = False
    ended: bool = False  # the handler is through
    stop_asked: bool = False
    given_up: bool = False  # its process cannot be killed for a while
    transaction: Transaction | None = None
    owed: dict[int, tuple[int, int]] = field(default_factory=dict)  # by msg_id: attempts, deaths


class FakeChild:
    def __init__(self, shell: Shell, child_id: ChildId, settings: QueueSettings) -> None:
        self.shell = shell
        self.id = child_id
        self.settings = settings
        self.world = shell.world
        self.queue = shell.world.queues[QueueName(settings.name)]
        self.alive = True
        self.ready = False
        self.exiting = False
        self.killed = False
        self.lives_on = False  # although it is killed
        self.frozen = False  # by SIGSTOP
        self.run: Run | None = None
        self.guard_deadline = 0.0
        self._told_at = 0.0

    def __repr__(self) -> str:
        return f"child {self.id} of {self.shell.name}"

    def _tell(self, event: e.Event, delay_s: float = 0.0) -> None:
        """What a child says arrives in order."""
        now = self.world.timeline.now
        self._told_at = max(self._told_at, now + delay_s + self.world.rng.random() * 0.002)
        self.world.timeline.at(self._told_at, self.shell.hear, event)

    def _tell_later(self, delay_s: float, event: e.Event) -> None:
        """What it will say if it still lives then."""
        self.world.timeline.after(delay_s, self._tell_alive, event)

    def _tell_alive(self, event: e.Event) -> None:
        if self.alive:
            self._tell(event)

    # --- life and death ---------------------------------------------------------------------------------------------

    def boot(self) -> None:
        hit, rng = self.world.faults.hit, self.world.rng
        if hit("boot.hung"):
            return
        takes_s = rng.uniform(0.3, 3.0) if hit("boot.slow") else rng.uniform(0.02, 0.2)
        self.world.timeline.after(takes_s, self._booted)

    def _booted(self) -> None:
        if not self.alive:
            return
        hit, rng = self.world.faults.hit, self.world.rng
        if self.world.code_broken or hit("boot.failed"):
            self._tell(e.ChildBootFailed(self.id, "import", "no module named x", ""))
            self.die(facts(exit_code=78))
        elif hit("boot.died"):
            self.die(facts(signal="SIGSEGV"))
        else:
            self.ready = True
            self._tell(e.ChildReady(self.id, 20_000))
            if hit("child.idle_death"):
                self.world.timeline.after(rng.uniform(0.0, 5.0), self._die_idle)
            if hit("child.idle_protocol"):
                self._tell_later(rng.uniform(0.0, 5.0), e.ProtocolBroken(self.id, "rubbish"))

    def _die_idle(self) -> None:
        if self.alive and self.run is None:
            self.die(facts(exit_code=1))

    def die(self, how: DeathFacts) -> None:
        if not self.alive:
            return
        self.alive = False
        run, self.run = self.run, None
        if run is not None and run.msg_id:
            self.world.ledger.ended(self, self.queue.name, run.msg_id, died=not run.given_up)
        if run is not None and run.transaction is not None:
            lingers = self.world.faults.hit("tx.lingers")
            after_s = self.world.rng.uniform(0.2, 4.0) if lingers else self.world.rng.uniform(0.0, 0.05)
            self.world.timeline.after(after_s, self._session_ends, run, run.transaction)
        self._tell(e.ChildDied(self.id, how), 0.001 + self.world.rng.random() * 0.01)

    def _session_ends(self, run: Run, transaction: Transaction) -> None:
        if transaction.open and run.started:
            message = self.world.ledger.message(self.queue.name, run.msg_id)
            message.uncharged_since = self.world.timeline.now
        self.queue.rollback(transaction)

    def kill(self) -> None:
        """SIGKILL works in milliseconds, unless the process hangs in the kernel."""
        if self.killed:
            return
        self.killed = True
        hit, rng = self.world.faults.hit, self.world.rng
        takes_s = rng.uniform(0.0005, 0.01)
        if hit("child.unkillable") or hit("child.slow_death"):
            takes_s = rng.uniform(0.1, 15.0)
            self.lives_on = True
            if self.run is not None and self.run.msg_id:
                self._runs_free(self.run)
        self.world.timeline.after(takes_s, self.die, KILLED)

    def _runs_free(self, run: Run) -> None:
        """It does not die when it is killed, and may be charged before it does."""
        run.given_up = True
        message = self.world.ledger.message(self.queue.name, run.msg_id)
        message.ran_free = True
        message.deaths += 1

    def guard(self, deadline: float) -> None:
        """The guard kills a child whose lease passes unrenewed, also when its supervisor is frozen."""
        checks = not self.guard_deadline
        self.guard_deadline = deadline
        if deadline and checks:
            self.world.timeline.at(deadline, self._guard_looks)

    def _guard_looks(self) -> None:
        deadline = self.guard_deadline
        if not deadline or not self.alive:
            return
        if deadline > self.world.timeline.now:
            self.world.timeline.at(deadline, self._guard_looks)
        elif not self.killed:
            if self.shell.alive and not self.shell.frozen:
                raise Violation("a child is killed before its lease runs out", f"{self}, {self.run}")
            self.die(KILLED_BY_GUARD)

    def exit(self) -> None:
        if self.run is not None:
            raise Violation("only an idle child is asked to end", f"{self}")
        self.exiting = True
        if not self.world.faults.hit("child.exit_ignored"):
            self.world.timeline.after(self.world.rng.uniform(0.005, 0.1), self.die, facts(exit_code=0))

    def _accepts(self) -> None:
        if not self.ready or self.exiting or self.run is not None:
            raise Violation("work goes to a ready child with empty hands", f"{self}")

    # --- regular mode -----------------------------------------------------------------------------------------------

    def dispatch(self, command: c.Dispatch) -> None:
        self._accepts()
        if not self.alive:
            return
        self.run = run = Run(command.claim_id, command.msg_id)
        self.guard(command.lease_deadline)
        if self.world.faults.hit("child.dispatch_lost"):
            self.frozen = True
            return
        self.world.timeline.after(self._start_delay(), self._start, run)

    def _start_delay(self) -> float:
        return self.world.rng.uniform(0.1, 2.0) if self.world.faults.hit("child.late") else 0.0003

    def _start(self, run: Run) -> None:
        if not self.alive or self.run is not run:
            return
        world, name = self.world, self.queue.name
        message = world.ledger.message(name, run.msg_id)
        nature = world.natures[name, run.msg_id]
        run.script = found = script(world.rng, nature, message.starts + 1, self.settings)
        unrun = self._not_to_be_run(run)
        if unrun is not None:
            run.ended = True
            self._tell(e.CommitRequested(self.id, run.claim_id, unrun))
            return
        if found.ending is Ending.DIES_EARLY or world.faults.hit("child.died_early"):
            self.die(found.death)
            return
        run.started = True
        world.ledger.started(self, name, run.msg_id)
        if run.transaction is not None:
            world.ledger.started_in_transaction(name, run.msg_id, world.timeline.now)
        self._tell(e.MessageStarted(self.id, run.claim_id))
        self._plan_end(run, found)

    def _not_to_be_run(self, run: Run) -> Outcome | None:
        """A transactional child asks at once: it was told to stop, or the message has had all its attempts."""
        if run.transaction is None:
            return None
        if run.stop_asked:
            return _STOPPED
        row, read_ct = run.transaction.row, run.transaction.read_ct
        accounts = parse_accounts(self.queue.accounts_of(row), self.queue.name, row.msg_id, read_ct)
        attempts, deaths = run.owed.get(row.msg_id, (0, 0))
        attempt = accounts.attempt(read_ct + attempts)
        if attempt > self.settings.max_attempts or accounts.deaths + deaths >= self.settings.max_deaths:
            return Outcome(OutcomeKind.ERROR, error=ErrorInfo("AttemptsExhausted", "", ""))
        return None

    def _plan_end(self, run: Run, found: Script) -> None:
        hit, timeline = self.world.faults.hit, self.world.timeline
        ending = found.ending
        if ending is Ending.RESULT:
            if hit("child.died"):
                ending = Ending.DIES
            elif hit("child.died_with_result"):
                ending = Ending.DIES_WITH_RESULT
            elif hit("child.died_after_result"):
                ending = Ending.DIES_AFTER_RESULT
        match ending:
            case Ending.RESULT | Ending.DIES_AFTER_RESULT:
                dies = ending is Ending.DIES_AFTER_RESULT
                timeline.after(found.takes_s, self._end, run, found.outcome, dies)
            case Ending.DIES | Ending.DIES_WITH_RESULT:
                timeline.after(found.takes_s, self._die_running, run, found.death)
            case Ending.HOGS:
                limit = self.settings.memory_limit_bytes or 0
                self._tell_later(found.takes_s / 2, e.MemoryMeasured(self.id, limit // 2))
                self._tell_later(found.takes_s, e.MemoryMeasured(self.id, limit + 1))
                timeline.after(found.takes_s + 5.0, self._end, run, found.outcome, False)
            case Ending.HANGS:
                self._tell_later(0.1, e.ProgressReported(self.id, run.claim_id, "still here"))
            case Ending.DIES_EARLY:
                pass
            case _:
                assert_never(ending)
        if hit("child.protocol"):
            self._tell_later(found.takes_s / 2, e.ProtocolBroken(self.id, "rubbish"))
        if run.stop_asked:
            self._react(run)

    def _die_running(self, run: Run, how: DeathFacts) -> None:
        if self.alive and self.run is run:
            self.die(how)

    def _end(self, run: Run, outcome: Outcome, dies: bool) -> None:
        """The handler is through, and says so."""
        if not self.alive or self.run is not run or run.ended:
            return
        run.ended = True
        self.world.ledger.ended(self, self.queue.name, run.msg_id, died=False)
        if outcome.kind is OutcomeKind.SUCCESS:
            successes = self.world.ledger.message(self.queue.name, run.msg_id).successes
            successes.add((self.shell.name, run.claim_id))
        if run.transaction is not None:
            self._tell(e.CommitRequested(self.id, run.claim_id, outcome))
        else:
            self._let_go(run)
            self._tell(e.MessageFinished(self.id, run.claim_id, outcome))
        if dies:
            self.die(KILLED)

    def _let_go(self, run: Run) -> None:
        if run.msg_id:
            self.world.ledger.ended(self, self.queue.name, run.msg_id, died=False)
        self.guard_deadline = 0.0
        self.run = None

    def stop(self, command: c.SendStop) -> None:
        run = self.run
        if run is None or run.claim_id != command.claim_id or self.frozen:
            return
        run.stop_asked = True
        if run.started:
            self._react(run)

    def _react(self, run: Run) -> None:
        if run.script is None or run.ended:
            return
        soon_s = self.world.rng.uniform(0.001, 0.3)
        match run.script.reaction:
            case Reaction.STOPS:
                self.world.timeline.after(soon_s, self._end, run, _STOPPED, False)
            case Reaction.FINISHES:
                self.world.timeline.after(soon_s, self._end, run, run.script.outcome, False)
            case Reaction.IGNORES:
                pass
            case _:
                assert_never(run.script.reaction)

    # --- transactional mode -----------------------------------------------------------------------------------------

    def permit(self, command: c.GrantPermit) -> None:
        self._accepts()
        if not self.alive:
            return
        self.run = run = Run(
            command.claim_id, owed={msg_id: (attempts, deaths) for msg_id, attempts, deaths in command.owed}
        )
        if self.world.faults.hit("child.dispatch_lost"):
            self.frozen = True
            return
        self.world.timeline.after(self.world.rng.uniform(0.0005, 0.003), self._claim, run)

    def _claim(self, run: Run) -> None:
        if not self.alive or self.run is not run:
            return
        world = self.world
        if world.database_down or world.faults.hit("tx.claim_failed"):
            self.run = None
            self._tell(e.TransactionEnded(self.id, run.claim_id, _sql_error("08006"), "08006", False, False))
            return
        if world.faults.hit("tx.permit_death"):
            self.die(facts(signal="SIGBUS"))
            return
        transaction = self.queue.claim_one(world.next_xid())
        if transaction is None:
            self.run = None
            self._tell(e.PermitEmpty(self.id, run.claim_id, self.queue.next_visible_s()))
            return
        row = transaction.row
        run.transaction, run.msg_id = transaction, row.msg_id
        if self.lives_on:
            self._runs_free(run)
        tx = TxIdentity(transaction.xid, self.id, 1)
        accounts = self.queue.accounts_of(row)
        self._tell(
            e.TransactionClaimed(
                self.id,
                run.claim_id,
                row.msg_id,
                transaction.read_ct,
                row.enqueued_us,
                row.vt_us,
                accounts,
                tx,
                transaction.touched,
                transaction.read_us,
            )
        )
        if world.faults.hit("tx.by_hand"):
            world.timeline.after(world.rng.uniform(0.01, 0.1), self._commit_by_hand, run)
        if world.faults.hit("tx.terminated"):
            world.timeline.after(world.rng.uniform(0.0, 0.05), self._lose_session, run)
        if world.faults.hit("child.dispatch_lost"):
            self.frozen = True
            return
        if not transaction.touched:
            world.timeline.after(self._start_delay(), self._start, run)

    def may_go_on(self, command: c.AnswerClaim) -> None:
        """The answer to a claim of what somebody had before."""
        run = self.run
        if run is None or run.claim_id != command.claim_id or self.frozen:
            return
        if run.started or run.transaction is None or not run.transaction.touched:
            raise Violation("an answer needs a question", f"{self}: {command}")
        if command.go:
            self.world.timeline.after(self._start_delay(), self._start, run)
        else:
            self.world.timeline.after(0.0005, self._give_up, run, command.postpone_ms)

    def _give_up(self, run: Run, postpone_ms: int | None) -> None:
        transaction = run.transaction
        self._end_without_commit(run, None)
        if transaction is not None and postpone_ms is not None and not self.world.database_down:
            self.queue.postpone(transaction, postpone_ms)

    def _lose_session(self, run: Run) -> None:
        """The backend is terminated while the handler runs; the next statement will say so."""
        if self.run is run and run.transaction is not None:
            self.world.ledger.message(self.queue.name, run.msg_id).ran_free = True
            self.queue.rollback(run.transaction)
            if self.world.rng.random() < 0.5:
                self.world.timeline.after(self.world.rng.uniform(0.0, 0.1), self._end_without_commit, run, "57P01")

    def _commit_by_hand(self, run: Run) -> None:
        """From then on nothing but its vt keeps the message from others."""
        transaction = run.transaction
        if self.run is run and run.started and not run.ended and transaction is not None and transaction.open:
            self.world.ledger.message(self.queue.name, run.msg_id).ran_free = True
            self.queue.commit_by_hand(transaction, self.settings.visibility_timeout_s)

    def _end_without_commit(self, run: Run, sqlstate: str | None, in_doubt: bool = False) -> None:
        if not self.alive or self.run is not run:
            return
        run.ended = True
        if run.transaction is not None:
            self.queue.rollback(run.transaction)
        self._let_go(run)
        error = None if sqlstate is None else _sql_error(sqlstate)
        asked = run.script.outcome if run.script is not None and run.started else None
        told = asked if not in_doubt and sqlstate == "57P01" and self.world.faults.hit("tx.told") else None
        self._tell(e.TransactionEnded(self.id, run.claim_id, error, sqlstate, in_doubt, True, told))

    def answer(self, command: c.AnswerCommit) -> None:
        run = self.run
        if run is None or run.claim_id != command.claim_id:
            return  # it died meanwhile
        if not run.ended:
            raise Violation("an answer needs a question", f"{self}: {command}")
        self.world.timeline.after(self.world.rng.uniform(0.0005, 0.005), self._commit, run, command)

    def _commit(self, run: Run, command: c.AnswerCommit) -> None:  # noqa: C901 - a table of fates
        transaction, settlement = run.transaction, command.settlement
        if not self.alive or self.run is not run or transaction is None:
            return
        hit, rng = self.world.faults.hit, self.world.rng
        if settlement is None:
            self._end_without_commit(run, None)
        elif not transaction.open:
            self._end_without_commit(run, "57P01", in_doubt=rng.random() < 0.2)
        elif isinstance(settlement, DeadLetter) and not self.queue.dlq_there:
            self._end_without_commit(run, "42P01")
        elif hit("tx.conflict"):
            self._end_without_commit(run, rng.choice(("40001", "40P01")))
        elif hit("tx.constraint"):
            self._end_without_commit(run, "23505")
        elif hit("tx.commit_hung"):
            if rng.random() < 0.5:
                self._apply(run, transaction, command)
        elif hit("tx.commit_died"):
            if rng.random() < 0.5:
                self._apply(run, transaction, command)
            self.die(KILLED)
        elif hit("tx.commit_lost"):
            if rng.random() < 0.5:
                self._apply(run, transaction, command)
            self._end_without_commit(run, "08006", in_doubt=True)
        else:
            self._apply(run, transaction, command)
            self._let_go(run)
            self._tell(e.Committed(self.id, run.claim_id))

    def _apply(self, run: Run, transaction: Transaction, command: c.AnswerCommit) -> None:
        if command.settlement is None:
            return
        if command.keep_work:
            self.world.ledger.may_ack(self.queue.name, self.shell.name, run.claim_id, run.msg_id)
        self.queue.commit(transaction, command.settlement, command.read_ct)

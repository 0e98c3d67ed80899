"""A core on a stage: its clock stands until it is moved, its world is what the test tells it.

Nothing is faked but the world: the real core decides, and the test reads the commands of its last step.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Final, TypeVar

from shared.pgmq.records import (
    ClaimedRow,
    Fence,
    ReckonOutcome,
    RenewOutcome,
    RenewResult,
    SettleFailure,
    SettleItem,
    SettleOutcome,
    SettleResult,
)
from supervisor.core import commands as c
from supervisor.core import events as e
from supervisor.core import happenings as h
from supervisor.core.core import Core
from supervisor.core.settings import CoreSettings, QueueSettings, RetryPolicy, Timing
from supervisor.core.snapshot import QueueSnapshot
from supervisor.core.types import (
    SUCCESS,
    ChildId,
    ClaimId,
    DeathFacts,
    ErrorInfo,
    Mode,
    Outcome,
    OutcomeKind,
    QueueName,
    TxIdentity,
)

C = TypeVar("C", bound=c.Command)
H = TypeVar("H", bound=h.Happening)

Q: Final = QueueName("q")
ERROR: Final = ErrorInfo("ValueError", "no", "Traceback ...")
FAILURE: Final = Outcome(OutcomeKind.ERROR, error=ERROR)
STOPPED: Final = Outcome(OutcomeKind.STOPPED)
TX: Final = TxIdentity(77, 4242, 1_000_000)


def queue(name: str = "q", **changes: Any) -> QueueSettings:
    """Settings of one queue; retries without jitter, so that delays can be read."""
    plain: dict[str, Any] = {
        "handler": "app:handle",
        "dead_letter_queue": f"{name}_dlq",
        "visibility_timeout_s": 30.0,
        "hard_timeout_s": None,
        "retry": RetryPolicy(base_s=1.0, factor=2.0, max_s=600.0, jitter=False),
    }
    return QueueSettings(name=name, **{**plain, **changes})


def transactional(**changes: Any) -> QueueSettings:
    """Settings of a queue in transactional mode."""
    return queue(mode=Mode.TRANSACTIONAL, **changes)


def row(msg_id: int, read_ct: int = 1, **changes: Any) -> ClaimedRow:
    """A claimed message with a small body."""
    plain: dict[str, Any] = {
        "fence": Fence(msg_id, read_ct, 1_000 * msg_id + read_ct),
        "lease_s": 30.0,
        "enqueued_us": 5,
        "visible_us": 5,
        "headers": None,
        "accounts": None,
        "body": b"{}",
        "body_loaded": True,
        "body_bytes": 2,
    }
    return ClaimedRow(**{**plain, **changes})


def accounts(msg_id: int, **numbers: int) -> str:
    """Our entry in a message's headers, as the database gives it."""
    parts = ", ".join(f'"{key}": {value}' for key, value in {"msg_id": msg_id, **numbers}.items())
    return f'{{"queue": "q", {parts}}}'


def facts(*, signal: str | None = None, exit_code: int | None = None, oom: bool = False) -> DeathFacts:
    """The end of a process."""
    return DeathFacts(exit_code, signal, 12_345, 0.5, "the stack", "the output", oom)


class Stage:
    """`last` holds the commands since the last call that told or waited."""

    def __init__(self, *queues: QueueSettings, timing: Timing | None = None, **settings: Any) -> None:
        self.now = 1000.0
        self.settings = CoreSettings(
            queues=queues or (queue(),),
            host="host",
            supervisor="me",
            version="1",
            timing=timing or Timing(),
            **settings,
        )
        self.core = Core(self.settings, lambda: 0.5)
        self.last: c.Answer = []
        self._claims: list[c.Claim] = []
        self._settlements: list[tuple[QueueName, SettleItem]] = []
        self._renewals: list[c.Renew] = []
        self._asked_at: dict[int, float] = {}
        self._pids = count(100)

    # --- telling and waiting ----------------------------------------------------------------------------------------

    def tell(self, *events: e.Event) -> Stage:
        """Events, one after the other, at this moment."""
        self.last = []
        for event in events:
            self._step(event)
        return self

    def _step(self, event: e.Event) -> None:
        commands = self.core.handle(event, self.now)
        self.last += commands
        for command in commands:
            if isinstance(command, c.Claim):
                self._claims.append(command)
                self._asked_at[id(command)] = self.now
            elif isinstance(command, c.Settle):
                self._settlements += [(command.queue, item) for item in command.items]
            elif isinstance(command, c.Renew):
                self._renewals.append(command)
                self._asked_at[id(command)] = self.now

    def wait(self, seconds: float) -> Stage:
        """Let time pass; the core is called whenever it wanted to be."""
        self.last = []
        end = self.now + seconds
        for _ in range(1000):
            deadline = self.core.next_deadline()
            if deadline > end:
                self.now = end
                return self
            self.now = max(self.now, deadline)
            self._step(e.TimePassed())
        raise AssertionError("the core wants to be called again and again")

    # --- reading ----------------------------------------------------------------------------------------------------

    def all(self, kind: type[C]) -> list[C]:
        """The commands of this kind in the last step."""
        return [command for command in self.last if isinstance(command, kind)]

    def only(self, kind: type[C]) -> C:
        """The one command of this kind in the last step."""
        (found,) = self.all(kind)
        return found

    def told(self, kind: type[H]) -> list[H]:
        """The happenings of this kind in the last step."""
        return [said for said in self.last if isinstance(said, kind)]

    def settlements(self) -> list[SettleItem]:
        """What was given to the settler in the last step."""
        return [item for command in self.all(c.Settle) for item in command.items]

    def look(self, name: str = "q") -> QueueSnapshot:
        """The queue as `status` shows it."""
        (found,) = [each for each in self.core.snapshot(self.now).queues if each.queue == name]
        return found

    def states(self) -> list[str]:
        """The states of the children, in the order of their start."""
        return [child.state for child in self.look().children]

    def children(self) -> list[ChildId]:
        """All children that are not gone, in the order of their start."""
        return [ChildId(child.child) for child in self.look().children]

    # --- children ---------------------------------------------------------------------------------------------------

    def start(self) -> Stage:
        """Start, and let every child become READY."""
        self.tell(e.Started())
        return self.ready()

    def ready(self) -> Stage:
        """Let what was started in the last step become READY."""
        started = self.all(c.StartChild)
        return self.tell(*[event for command in started for event in self._birth(command)])

    def _birth(self, command: c.StartChild) -> tuple[e.Event, ...]:
        return e.ChildSpawned(command.child, next(self._pids)), e.ChildReady(command.child, 20_000)

    def die(self, child: ChildId, **how: Any) -> Stage:
        """The process is gone; by default a segmentation fault."""
        return self.tell(e.ChildDied(child, facts(**(how or {"signal": "SIGSEGV"}))))

    # --- regular mode -----------------------------------------------------------------------------------------------

    def give(self, *rows: ClaimedRow, next_visible_s: float | None = None, which: int = 0) -> Stage:
        """Answer a claim that is under way: the oldest, or the one in this place."""
        command = self._claims.pop(which)
        asked_at = self._asked_at.pop(id(command))
        full = len(rows) == command.limit
        return self.tell(e.Claimed(command.queue, command.limit, asked_at, rows, next_visible_s, full))

    def fail_claim(self, error: str = "connection refused") -> Stage:
        """The claim that is under way fails."""
        command = self._claims.pop(0)
        return self.tell(e.ClaimFailed(command.queue, error))

    @property
    def claiming(self) -> c.Claim | None:
        """The claim that is under way."""
        return self._claims[0] if self._claims else None

    def run(self, message: ClaimedRow) -> c.Dispatch:
        """Let a child begin with a message."""
        (dispatch,) = self.run_all(message)
        return dispatch

    def run_all(self, *messages: ClaimedRow) -> list[c.Dispatch]:
        """Let as many children begin with a message each."""
        dispatches = self.give(*messages).all(c.Dispatch)
        self.tell(*[e.MessageStarted(dispatch.child, dispatch.claim_id) for dispatch in dispatches])
        return dispatches

    def finish(self, dispatch: c.Dispatch, outcome: Outcome = SUCCESS) -> Stage:
        """The handler is through."""
        return self.tell(e.MessageFinished(dispatch.child, dispatch.claim_id, outcome))

    def settle(
        self, outcome: SettleOutcome = SettleOutcome.DONE, failure: SettleFailure = SettleFailure.REFUSED
    ) -> Stage:
        """The database answers all that was given to the settler."""
        given, self._settlements = self._settlements, []
        error = "no" if outcome is SettleOutcome.FAILED else None
        return self.tell(
            *[e.Settled(name, (SettleResult(item.claim_id, outcome, error, failure),)) for name, item in given],
        )

    def renew(self, outcome: RenewOutcome = RenewOutcome.DONE) -> Stage:
        """The database answers the renewal that is under way."""
        command = self._renewals.pop(0)
        lease_s = command.lease_s if outcome is RenewOutcome.DONE else 0.0
        results = tuple(RenewResult(claim_id, outcome, lease_s) for claim_id, _fence in command.fences)
        return self.tell(e.Renewed(command.queue, self._asked_at.pop(id(command)), results))

    def fail_renewal(self) -> Stage:
        """The renewal that is under way fails."""
        command = self._renewals.pop(0)
        return self.tell(e.RenewFailed(command.queue, "no answer"))

    # --- transactional mode -----------------------------------------------------------------------------------------

    def tx_claim(self, grant: c.GrantPermit, msg_id: int, read_ct: int = 1, accounts: str | None = None) -> Stage:
        """A child claimed and begins with the handler."""
        claimed = e.TransactionClaimed(grant.child, grant.claim_id, msg_id, read_ct, 5, 5, accounts, TX)
        return self.tell(claimed, e.MessageStarted(grant.child, grant.claim_id))

    def ask_commit(self, grant: c.GrantPermit, outcome: Outcome = SUCCESS) -> Stage:
        """Its handler is through."""
        return self.tell(e.CommitRequested(grant.child, grant.claim_id, outcome))

    def tx_end(self, grant: c.GrantPermit, sqlstate: str | None = None, *, in_doubt: bool = False) -> Stage:
        """It ended without a commit that it knows of."""
        error = None if sqlstate is None else ErrorInfo("DatabaseError", sqlstate, "")
        return self.tell(e.TransactionEnded(grant.child, grant.claim_id, error, sqlstate, in_doubt, claimed=True))

    def reckon(self, claim_id: ClaimId, outcome: ReckonOutcome, *, committed: bool | None = None) -> Stage:
        """The database says what became of an attempt; `committed` where its server still knows the transaction."""
        return self.tell(e.Reckoned(Q, claim_id, outcome, None, committed))

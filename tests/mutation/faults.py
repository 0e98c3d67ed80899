"""The faults: for each guard that the design calls necessary, the smallest edit that takes it away.

`old` must occur exactly once in `file`; a test says so, so that whoever changes the code changes the fault with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FAULTS", "SIMULATION", "Fault"]

SIMULATION: Final = "simulation"  # in place of a path: 300 seeds of the simulator
_SETTLING_SQL: Final = "tests/integration/test_statements_settling.py"
_TX_SQL: Final = "tests/integration/test_statements_transactions.py"
_CORE: Final = "tests/unit/core"
_CHILD: Final = "tests/process/test_child_regular.py"
_CHILD_TX: Final = "tests/integration/test_child_transactional.py"
_POINTS: Final = "tests/process/test_child_syncpoints.py"
_DEATHS: Final = "tests/process/test_processes_deaths.py"
_PLANS: Final = "tests/integration/test_database_plans.py"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and the tests that are asked, in order, until one fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS: Final = (
    # --- SQL: the fence and what ends it
    Fault(
        "the fence is dropped: whoever knows the number settles",
        "shared/pgmq/statements/_compose.py",
        """    "m.msg_id = w.msg_id and m.read_ct = w.read_ct"
    " and m.last_read_at = timestamptz 'epoch' + w.read_us * interval '1 microsecond'"
""",
        """    "m.msg_id = w.msg_id"
""",
        (_SETTLING_SQL,),
    ),
    Fault(
        "the fence does not carry last_read_at",
        "shared/pgmq/statements/_compose.py",
        """    " and m.last_read_at = timestamptz 'epoch' + w.read_us * interval '1 microsecond'"
""",
        "",
        (_SETTLING_SQL,),
    ),
    Fault(
        "renewals and acks need no lease",
        "shared/pgmq/statements/settling.py",
        '_LEASE = sql.SQL(" and m.vt > clock_timestamp()")',
        '_LEASE = sql.SQL("")',
        (_SETTLING_SQL,),
    ),
    Fault(
        "a settlement that keeps the row keeps the fence",
        "shared/pgmq/statements/_compose.py",
        """sql.SQL("greatest(clock_timestamp(), m.last_read_at + interval '1 microsecond')")""",
        'sql.SQL("m.last_read_at")',
        (_SETTLING_SQL,),
    ),
    Fault(
        "a killed child's session is ended by its pid alone",
        "shared/pgmq/statements/transactions.py",
        """
  and a.backend_start = timestamptz 'epoch' + %(start_us)s::bigint * interval '1 microsecond'
  and a.backend_xid::text::bigint = %(xid)s::bigint & 4294967295
""",
        "\n",
        (_TX_SQL,),
    ),
    # --- policy: what counts, and what is given back
    Fault(
        "no charge for a death",
        "supervisor/core/policy.py",
        "accounts = delivery.accounts.charged_death()",
        "accounts = delivery.accounts",
        (_CORE, SIMULATION),
    ),
    Fault(
        "a release without a refund",
        "supervisor/core/policy.py",
        """accounts = delivery.accounts.refunded()
        text = accounts.to_json(self._queue.name, delivery.msg_id)""",
        """accounts = delivery.accounts
        text = accounts.to_json(self._queue.name, delivery.msg_id)""",
        (_CORE, SIMULATION),
    ),
    Fault(
        "what a child dies of is acknowledged",
        "supervisor/core/policy.py",
        "        accounts = delivery.accounts.charged_death()\n",
        """        return Verdict(Ack(self._queue.on_success), "success")
        accounts = delivery.accounts.charged_death()
""",
        (_CORE, SIMULATION),
    ),
    Fault(
        "max_deaths is not looked at",
        "supervisor/core/policy.py",
        "if accounts.deaths >= self._queue.max_deaths or delivery.attempt >= self._queue.max_attempts:",
        "if delivery.attempt >= self._queue.max_attempts:",
        (_CORE, SIMULATION),
    ),
    Fault(
        "deaths before the start are refunded for ever",
        "supervisor/core/regular.py",
        "elif early <= self.settings.max_deaths or cause is DeathCause.UNRESPONSIVE:",
        "elif True:",
        (_CORE, SIMULATION),
    ),
    Fault(
        "deadlocks are refunded for ever",
        "supervisor/core/policy.py",
        "if accounts.deadlocks >= MAX_DEADLOCKS_IN_A_ROW:",
        "if False:",
        (_CORE, SIMULATION),
    ),
    # --- regular mode
    Fault(
        "acknowledged after the grace period",
        "supervisor/core/regular.py",
        "elif self.ctx.acks_off:",
        "elif False:",
        (_CORE, SIMULATION),
    ),
    Fault(
        "acknowledged after the lease has run out",
        "supervisor/core/regular.py",
        "elif now >= delivery.lease_deadline:",
        "elif False:",
        (_CORE, SIMULATION),
    ),
    Fault(
        "a lost lease does not turn acks off",
        "supervisor/core/leases.py",
        "delivery.fence_lost = True",
        "delivery.fence_lost = False",
        (_CORE, SIMULATION),
    ),
    Fault(
        "no kill before the lease runs out",
        "supervisor/core/limits.py",
        "if now >= self._lease_limit(delivery):",
        "if False:",
        (_CORE, SIMULATION),
    ),
    Fault(
        "no hard timeout",
        "supervisor/core/limits.py",
        "if running and hard is not None and now >= (delivery.started_at or 0.0) + hard:",
        "if False:",
        (_CORE, SIMULATION),
    ),
    # --- transactional mode
    Fault(
        "no reckoning after an attempt without a commit",
        "supervisor/core/reckoning.py",
        """        self._open[delivery.id] = delivery
        self._ask(delivery)
""",
        """        delivery.move(DeliveryState.ENDED)
""",
        (_CORE, SIMULATION),
    ),
    Fault(
        "permits while a reckoning is under way",
        "supervisor/core/transactional.py",
        "        if self.reckonings.urgent:\n            return",
        "        if False:\n            return",
        (_CORE, SIMULATION),
    ),
    Fault(
        "what another supervisor's dead child gave back runs at once",
        "supervisor/core/transactional.py",
        "                self._refuse(child, delivery, _POSTPONED_MS)\n",
        "                delivery.held_until = None\n"
        "                self.ctx.do(c.AnswerClaim(child.id, delivery.id, go=True))\n",
        (SIMULATION,),
    ),
    Fault(
        "whatever was locked before is taken for something that was given up",
        "shared/pgmq/statements/transactions.py",
        "        touched=_TOUCHED,\n",
        "        touched=sql.SQL(\"d.holder <> '0'::xid\"),\n",
        (_TX_SQL,),
    ),
    Fault(
        "a pause is forgotten by the row",
        "child/database.py",
        '        self._say(b"rollback", pause)\n',
        '        self._say(b"rollback")\n',
        (_CHILD_TX,),
    ),
    Fault(
        "a charge that finds its row moved on is forgotten",
        "supervisor/core/reckoning.py",
        "        self._owed[delivery.msg_id] = before + Owed(attempts, charge.deaths)\n",
        "        return\n",
        (_CORE, SIMULATION),
    ),
    Fault(
        "a commit in doubt is taken for a rollback",
        "supervisor/core/reckoning.py",
        'if delivery.in_doubt and granted is not None and granted.kind != "retry" and committed is not False:',
        "if False:",
        (_CORE, SIMULATION),
    ),
    Fault(
        "the child commits what the parent refused",
        "child/transactional.py",
        """        if verdict["verdict"] == "refuse":
            self._database.roll_back()
""",
        """        if verdict["verdict"] == "refuse":
            self._database.commit()
""",
        (_CHILD_TX,),
    ),
    Fault(
        "a commit is asked for without a look at the transaction",
        "child/transactional.py",
        """        try:
            self._database.check_state()
        except Fault as fault:
""",
        """        try:
            return outcome
        except Fault as fault:
""",
        (_CHILD_TX,),
    ),
    # --- statements that are planned once
    Fault(
        "the parent prepares its claims behind a pooler, too",
        "supervisor/database/connections.py",
        "if await cursor.fetchone() == (connection.info.backend_pid,):",
        "if await cursor.fetchone() is not None:",
        (_PLANS,),
    ),
    Fault(
        "a child takes a pooler's session for its own",
        "child/database.py",
        "self._pooled = pid != connection.info.backend_pid",
        "self._pooled = False",
        (_CHILD_TX,),
    ),
    Fault(
        "a claim's plan for an empty queue is kept for a full one",
        "supervisor/database/connections.py",
        '            **dict.fromkeys(_MISLEADING, "off"),\n',
        "",
        (_PLANS,),
    ),
    Fault(
        "a child's plan for an empty queue is kept for a full one",
        "child/database.py",
        "        say(connection, sessions.limits(sessions.INDEXES_ONLY, local=False))\n",
        "",
        (_CHILD_TX,),
    ),
    Fault(
        "the handler's statements find enable_seqscan as the claim needs it",
        "shared/pgmq/statements/transactions.py",
        "        if seqscan is None\n",
        "        if True\n",
        (_CHILD_TX,),
    ),
    # --- children
    Fault(
        "a start is not marked: deaths in the handler go uncharged",
        "child/regular.py",
        "        start_mark[0] = seq\n",
        "",
        (_POINTS,),
    ),
    Fault(
        "the mark of a child that has ended is not looked at",
        "supervisor/processes/channel.py",
        """        self.awaits_start()
        left = """,
        "        left = ",
        (_DEATHS,),
    ),
    Fault(
        "the mark of an earlier message counts for the next",
        "supervisor/processes/channel.py",
        "if self._begun() != claim_id:",
        "if not self._begun():",
        (_DEATHS,),
    ),
    Fault(
        "nobody looks at marks while a message runs",
        "supervisor/processes/starts.py",
        "            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)",
        "            return",
        ("tests/process/test_processes_stuck.py",),
    ),
    Fault(
        "an exception of a handler is a success",
        "child/caller.py",
        "return of_exception(error, stopping=self._channel.stop_seen(), with_sqlstate=self._with_sqlstate)",
        "return None",
        (_CHILD,),
    ),
    Fault(
        "a message is read while a signal's function could still take it away",
        "child/channel.py",
        "if (self.wary or timeout_s is not None)",
        "if timeout_s is not None",
        (_CHILD,),
    ),
    Fault(
        "gathered acknowledgements are forgotten",
        "supervisor/core/settling.py",
        "        if now >= self.say_at:\n            self._say_gathered(now)\n",
        "",
        ("tests/unit/core/test_settling.py",),
    ),
    Fault(
        "acknowledgements of long work wait for company",
        "supervisor/core/regular.py",
        "quick = (self.pacing.estimate_s or 0.0) < self._gather_acks_s and not self.ctx.draining",
        "quick = True",
        ("tests/unit/core/test_settling.py",),
    ),
    Fault(
        "a forked copy answers too",
        "child/caller.py",
        "        if os.getpid() != self._pid:\n",
        "        if False:\n",
        (_CHILD,),
    ),
    Fault(
        "a stop for one message reaches the next",
        "child/channel.py",
        "            elif frame.seq == self.seq:\n",
        "            else:\n",
        (_CHILD,),
    ),
    Fault(
        "left-overs are killed by number, whoever has it now",
        "supervisor/processes/killing.py",
        "if stat is None or stat.start_ticks != start_ticks or not stat.alive:",
        "if stat is None:",
        ("tests/process/test_processes_leftovers.py",),
    ),
    Fault(
        "last words of a dead child are not read",
        "supervisor/processes/endings.py",
        "        process.channel.drain()\n",
        "        process.channel.close()\n",
        ("tests/process/test_processes_protocol.py",),
    ),
    Fault(
        "only the leader is killed, not its group",
        "supervisor/processes/process.py",
        "os.killpg(self.pid, signal.SIGKILL)",
        "os.kill(self.pid, 0)",
        ("tests/process/test_processes_leftovers.py",),
    ),
    Fault(
        "what a child leaves behind is not swept",
        "supervisor/processes/endings.py",
        "if found and self._loop.time() < give_up:",
        "if False:",
        ("tests/process/test_processes_leftovers.py",),
    ),
    Fault(
        "the guard does not watch leases",
        "supervisor/processes/guard_main.py",
        "if at and now >= at and not self._table.killed(ward.slot):",
        "if False:",
        ("tests/process/test_guard_death.py",),
    ),
    Fault(
        "the guard does not end what a dead supervisor leaves",
        "supervisor/processes/guard_main.py",
        "        self._end_all()\n",
        "        return\n",
        ("tests/process/test_guard_death.py",),
    ),
    Fault(
        "a settlement whose answer was lost is not said again",
        "supervisor/database/settler.py",
        "again = isinstance(error, ConnectionLost) or is_transient(error)",
        "again = False",
        ("tests/integration/test_database_commands.py",),
    ),
    # --- the marks of the tests themselves: what they say is exercised is
    Fault(
        "a state table allows a step that nobody takes",
        "supervisor/core/states.py",
        "_C.UNKILLABLE: frozenset({_C.GONE}),",
        "_C.UNKILLABLE: frozenset({_C.GONE, _C.KILLED}),",
        ("tests/simulation/test_simulation.py",),
    ),
    Fault(
        "a sync point that nobody crosses",
        "supervisor/database/renewer.py",
        'syncpoints.hit("parent.renew.after"',
        'len(("parent.renew.after"',
        ("tests/crash/test_sync_points.py",),
    ),
)

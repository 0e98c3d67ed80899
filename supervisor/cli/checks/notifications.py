"""Notifications: whether they arrive, whether a pooler is in between, and whether PGMQ sends them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from shared.errors import SupervisorError
from shared.naming import q_table
from supervisor.cli.checks.findings import Finding, ok, warning
from supervisor.cli.opening import connect
from supervisor.cli.server import ServerFacts
from supervisor.config import Config

__all__ = ["check_notifications"]

_PATIENCE_S = 3.0
_TRIGGER = "trigger_notify_queue_insert_listeners"
_THROTTLE = "pgmq.notify_insert_throttle"
_DIRECT = "set [database] listen_dsn to the server itself; until then queues are polled"
_SAME = "let [database] listen_dsn lead to the same database, past every pooler; until then queues are polled"
_REPAIRED = "`run` repairs it at its start; or pgmq.enable_notify_insert"


def check_notifications(config: Config, connection: psycopg.Connection[Any], facts: ServerFacts) -> Iterator[Finding]:
    """Listen as the supervisor would, notify from the other connection, and wait a little."""
    listen_dsn = config.database.listen_dsn
    yield from _pooler(connection, has_listen_dsn=listen_dsn is not None)
    try:
        with connect(config, listen_dsn) as listener:
            arrives = _arrives(listener, connection)
    except (SupervisorError, psycopg.Error) as error:
        yield warning("notify", f"listening failed: {' '.join(str(error).split())}", _SAME if listen_dsn else _DIRECT)
    else:
        if arrives:
            yield ok("notify", "a notification made its way")
        else:
            text = f"a notification did not arrive within {_PATIENCE_S:g} s"
            yield warning("notify", text, _SAME if listen_dsn else _DIRECT)
    if facts.has_pgmq and facts.may_use_pgmq:
        for name, queue in config.queues.items():
            if queue.notify:
                yield from _triggers(connection, name, facts.role)


def _pooler(connection: psycopg.Connection[Any], *, has_listen_dsn: bool) -> Iterator[Finding]:
    """A pooler makes up the backend's number at connect: it differs from what the server says."""
    row = connection.execute("select pg_backend_pid()").fetchone()
    if row is None or row[0] == connection.info.backend_pid:
        yield ok("pooler", "none in between")
    elif has_listen_dsn:
        yield ok("pooler", "there is one between us and the server, and listen_dsn beside it")
    else:
        yield warning(
            "pooler",
            "there is a pooler between us and the server",
            "transaction pooling works for everything but LISTEN: set [database] listen_dsn to the server itself",
        )


def _arrives(listener: psycopg.Connection[Any], notifier: psycopg.Connection[Any]) -> bool:
    """Try a channel of our own, and only believe our own payload."""
    channel = f"pgmq_supervisor_check_{secrets.token_hex(8)}"
    listener.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
    notifier.execute("select pg_notify(%s, %s)", [channel, channel])
    found = listener.notifies(timeout=_PATIENCE_S, stop_after=1)
    return any(notify.payload == channel for notify in found)


def _triggers(connection: psycopg.Connection[Any], name: str, role: str) -> Iterator[Finding]:
    """Look for the trigger and for the throttle's row; a server crash empties the unlogged table of the latter."""
    table = q_table(name)
    row = connection.execute(
        "select exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname = %s and t.tgenabled <> 'D'),"
        " pg_has_role(c.relowner, 'usage'), quote_ident(pg_get_userbyid(c.relowner))"
        " from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'pgmq' and c.relname = %s",
        [_TRIGGER, table],
    ).fetchone()
    if row is None:
        return  # the queue is not there yet
    subject = f"notify {name}"
    stands, is_ours, owner = row
    if not stands:
        text = "PGMQ's notify trigger is missing on the queue"
        if is_ours:
            yield warning(subject, text, _REPAIRED)
        else:
            remedy = f"let its owner {owner} run `pgmq-supervisor init`, or grant {owner} to {role}"
            yield warning(subject, f"{text}, and only its owner may make it", remedy)
        return
    lacking = [
        right
        for right, may in zip(
            ("select", "insert", "update"),
            connection.execute(
                "select has_table_privilege(%(t)s, 'select'), has_table_privilege(%(t)s, 'insert'),"
                " has_table_privilege(%(t)s, 'update')",
                {"t": _THROTTLE},
            ).fetchone()
            or (),
            strict=False,
        )
        if not may
    ]
    if lacking:
        yield warning(
            subject,
            f"no right to {', '.join(lacking)} in {_THROTTLE}: its row's loss after a server crash could not be mended"
            + (", and this role cannot send to the queue, which a redrive does" if "update" in lacking else ""),
            f"grant select, insert, update on {_THROTTLE} to {role}; until then polling finds the messages",
        )
    if "select" in lacking:
        return
    throttled = connection.execute(
        "select exists (select from pgmq.notify_insert_throttle where queue_name = %s)", [name]
    ).fetchone()
    if throttled is None or not throttled[0]:
        yield warning(subject, "the throttle's row is missing: the trigger notifies nobody", _REPAIRED)
    elif not lacking:
        yield ok(subject, "trigger and throttle row are there")

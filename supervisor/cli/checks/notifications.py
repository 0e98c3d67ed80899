"""Notifications: whether they arrive, whether a pooler is in between, and whether PGMQ sends them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from shared.naming import q_table
from supervisor.cli.checks.findings import Finding, ok, warning
from supervisor.cli.opening import connect
from supervisor.config import Config

__all__ = ["check_notifications"]

_PATIENCE_S = 3.0
_TRIGGER = "trigger_notify_queue_insert_listeners"
_DIRECT = "set [database] listen_dsn to the server itself; until then queues are polled"
_REPAIRED = "`run` repairs it at its start; or pgmq.enable_notify_insert"


def check_notifications(config: Config, connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Listen as the supervisor would, notify from the other connection, and wait a little."""
    yield from _pooler(connection)
    with connect(config, config.database.listen_dsn) as listener:
        if _arrives(listener, connection):
            yield ok("notify", "a notification made its way")
        else:
            yield warning("notify", f"a notification did not arrive within {_PATIENCE_S:g} s", _DIRECT)
    for name, queue in config.queues.items():
        if queue.notify:
            yield from _triggers(connection, name)


def _pooler(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    """A pooler makes up the backend's number at connect: it differs from what the server says."""
    row = connection.execute("select pg_backend_pid()").fetchone()
    if row is not None and row[0] != connection.info.backend_pid:
        yield warning(
            "pooler",
            "there is a pooler between us and the server",
            "transaction pooling works for everything but LISTEN: set [database] listen_dsn to the server itself",
        )
    else:
        yield ok("pooler", "none in between")


def _arrives(listener: psycopg.Connection[Any], notifier: psycopg.Connection[Any]) -> bool:
    """Try a channel of our own, and only believe our own payload."""
    channel = f"pgmq_supervisor_check_{secrets.token_hex(8)}"
    listener.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
    notifier.execute("select pg_notify(%s, %s)", [channel, channel])
    found = listener.notifies(timeout=_PATIENCE_S, stop_after=1)
    return any(notify.payload == channel for notify in found)


def _triggers(connection: psycopg.Connection[Any], name: str) -> Iterator[Finding]:
    """Look for the trigger and for the throttle's row; a server crash empties the unlogged table of the latter."""
    table = q_table(name)
    row = connection.execute(
        "select exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname = %s and t.tgenabled <> 'D')"
        " from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'pgmq' and c.relname = %s",
        [_TRIGGER, table],
    ).fetchone()
    if row is None:
        return  # the queue is not there yet
    subject = f"notify {name}"
    if not row[0]:
        yield warning(subject, "PGMQ's notify trigger is missing on the queue", _REPAIRED)
        return
    try:
        throttled = connection.execute(
            "select exists (select from pgmq.notify_insert_throttle where queue_name = %s)", [name]
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        yield warning(
            subject,
            "no right to read pgmq.notify_insert_throttle: its loss after a server crash would not be noticed",
            "grant select, insert on pgmq.notify_insert_throttle to this role; until then polling finds the messages",
        )
        return
    if throttled is None or not throttled[0]:
        yield warning(subject, "the throttle's row is missing: the trigger notifies nobody", _REPAIRED)
    else:
        yield ok(subject, "trigger and throttle row are there")

"""Pieces that several statements share, and the composition itself."""

from __future__ import annotations

from typing import Final, LiteralString

from psycopg import sql

from shared.naming import a_table, q_table

ENTRY: Final = sql.SQL("'x-supervisor'")
"""The key of our entry in a message's headers."""

WANTED: Final = sql.SQL(
    "unnest(%(ids)s::bigint[], %(cts)s::integer[], %(ats)s::bigint[]) with ordinality as w(msg_id, read_ct, read_us, n)"
)
"""Fences as three arrays; n counts from 1."""

FENCE: Final = sql.SQL(
    "m.msg_id = w.msg_id and m.read_ct = w.read_ct"
    " and m.last_read_at = timestamptz 'epoch' + w.read_us * interval '1 microsecond'"
)
"""Ownership of one delivery, exact to the microsecond. The wanted side is computed: last_read_at may be anything."""

END_FENCE: Final = sql.SQL("greatest(clock_timestamp(), m.last_read_at + interval '1 microsecond')")
"""A new last_read_at that differs from the old one, whatever the clock does: nothing matches the old fence again."""


def compose(template: LiteralString, **parts: sql.Composable) -> bytes:
    """Put identifiers and pieces into a template; what remains are `%(name)s` parameters."""
    return sql.SQL(template).format(**parts).as_bytes(None)


def piece(template: LiteralString, **parts: sql.Composable) -> sql.Composed:
    """Compose a part of a statement."""
    return sql.SQL(template).format(**parts)


def live(queue: str) -> sql.Identifier:
    """Name the table of live messages. Raises `ValidationError`."""
    return sql.Identifier("pgmq", q_table(queue))


def archived(queue: str) -> sql.Identifier:
    """Name the table of archived messages. Raises `ValidationError`."""
    return sql.Identifier("pgmq", a_table(queue))


def kept_in_archive(queue: str) -> sql.Composed:
    """Write the removed rows `done` to the archive.

    It may know the number already: an unlogged queue counts from 1 again after a crash, its archive is durable. What
    stands there stays, and the message goes; else it would be handled for ever.
    """
    return piece(
        "kept as (insert into {a} (msg_id, vt, read_ct, enqueued_at, last_read_at, message, headers)"
        " select msg_id, vt, read_ct, enqueued_at, last_read_at, message, headers from done on conflict do nothing)",
        a=archived(queue),
    )


def micros(expression: LiteralString) -> sql.Composed:
    """Turn a timestamp into microseconds since the epoch; infinities and NULL, which no integer can say, become 0."""
    return piece(
        "case when isfinite({e}) then (extract(epoch from {e}) * 1000000)::bigint else 0 end", e=sql.SQL(expression)
    )


def iso(expression: LiteralString) -> sql.Composed:
    """Turn a timestamp into ISO 8601 text in UTC; infinities keep their names."""
    return piece(
        "case when isfinite({e}) then to_char({e} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"+00:00\"')"
        " else ({e})::text end",
        e=sql.SQL(expression),
    )


def accounts_of(headers: LiteralString) -> sql.Composed:
    """Read our entry as JSON text, without the headers that may be wrapped in it.

    NULL where headers are no object, where the entry is none, and where it is too large to be ours: a forged one must
    neither raise nor cost.
    """
    return piece(
        "case when jsonb_typeof({h}) = 'object' and jsonb_typeof({h} -> {entry}) = 'object'"
        " and pg_column_size(({h} -> {entry}) - 'headers') <= 2048"
        " then (({h} -> {entry}) - 'headers')::text end",
        h=sql.SQL(headers),
        entry=ENTRY,
    )


def _is_wrapped(queue: str, headers: sql.Composable, msg_id: sql.Composable) -> sql.Composed:
    """Tell whether headers that were no object stand inside our entry; only sound where headers are an object."""
    return piece(
        "(jsonb_typeof({h} -> {entry}) = 'object' and ({h} -> {entry}) ? 'headers'"
        " and ({h} -> {entry} -> 'queue') = to_jsonb({queue}::text) and ({h} -> {entry} -> 'msg_id') = to_jsonb({id})"
        " and ({h} - {entry}) = jsonb_build_object())",
        h=headers,
        id=msg_id,
        entry=ENTRY,
        queue=sql.Literal(queue),
    )


def headers_with_accounts(queue: str, accounts: LiteralString) -> sql.Composed:
    """Replace our whole entry in `m.headers`; NULL accounts leave the headers alone.

    Headers that are no object (NULL too) are kept inside the entry, under "headers", so that they can be given back.
    """
    return piece(
        "case when {accounts} is null then m.headers"
        " when jsonb_typeof(m.headers) is distinct from 'object' then jsonb_build_object({entry},"
        " {accounts}::jsonb || jsonb_build_object('headers', coalesce(m.headers, 'null'::jsonb)))"
        " when {wrapped} then jsonb_build_object({entry},"
        " {accounts}::jsonb || jsonb_build_object('headers', m.headers -> {entry} -> 'headers'))"
        " else m.headers || jsonb_build_object({entry}, {accounts}::jsonb) end",
        accounts=sql.SQL(accounts),
        entry=ENTRY,
        wrapped=_is_wrapped(queue, sql.SQL("m.headers"), sql.SQL("m.msg_id")),
    )


def original_headers(queue: str, headers: LiteralString, msg_id: LiteralString) -> sql.Composed:
    """Give headers as their sender wrote them: without our entry, and unwrapped. SQL NULL becomes JSON null."""
    return piece(
        "coalesce(case when jsonb_typeof({h}) is distinct from 'object' then {h}"
        " when {wrapped} then {h} -> {entry} -> 'headers'"
        " else {h} - {entry} end, 'null'::jsonb)",
        h=sql.SQL(headers),
        entry=ENTRY,
        wrapped=_is_wrapped(queue, sql.SQL(headers), sql.SQL(msg_id)),
    )


def dead_letter_document(queue: str, envelope: LiteralString) -> sql.Composed:
    """Build the whole dead letter from the envelope and a removed row `d` of its source."""
    return piece(
        "{envelope}::jsonb || jsonb_build_object("
        "'source', coalesce({envelope}::jsonb -> 'source', jsonb_build_object())"
        " || jsonb_build_object('enqueued_at', {enqueued}),"
        " 'dead_lettered_at', {now}, 'message', coalesce(d.message, 'null'::jsonb), 'headers', {headers})",
        envelope=sql.SQL(envelope),
        enqueued=iso("d.enqueued_at"),
        now=iso("clock_timestamp()"),
        headers=original_headers(queue, "d.headers", "d.msg_id"),
    )

"""Accounts: what counts as an attempt, what is refunded, and that nobody can forge either."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.pgmq.records import DeadLetter, Release, Retry
from supervisor.core import commands as c
from supervisor.core.accounts import CLEAN, MAX_DEADLOCKS_IN_A_ROW, Accounts, parse_accounts
from tests.unit.core.stage import FAILURE, Stage, accounts, queue, row

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("refunds", "deaths", "early", "deadlocks")


@given(
    numbers=st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON)),
    owner=JSON,
    read_ct=st.integers(-5, 2**31),
)
def test_whatever_stands_in_the_headers_is_read(numbers: dict[str, object], owner: object, read_ct: int) -> None:
    """Never an error, never more than can be true."""
    for msg_id in (owner, 7):
        text = json.dumps({"queue": "q", "msg_id": msg_id, **numbers})
        found = parse_accounts(text, "q", 7, read_ct)
        most = max(0, read_ct - 1)
        assert 0 <= found.refunds <= most
        assert 0 <= found.deaths <= most
        assert found.early >= 0
        assert 0 <= found.deadlocks <= MAX_DEADLOCKS_IN_A_ROW
        assert found.attempt(read_ct) >= 1


@given(text=st.text(max_size=40) | st.just("[" * 100_000))
def test_no_text_is_an_error(text: str) -> None:
    """The database gives JSON, but nothing here relies on it."""
    assert parse_accounts(text, "q", 7, 5).attempt(5) >= 1


@given(refunds=st.integers(0, 90), deaths=st.integers(0, 90), early=st.integers(0, 90), deadlocks=st.integers(0, 10))
def test_what_was_written_is_read_back(refunds: int, deaths: int, early: int, deadlocks: int) -> None:
    """Across restarts and hosts."""
    written = Accounts(refunds, deaths, early, deadlocks)
    assert parse_accounts(written.to_json("q", 7), "q", 7, 100) == written


@pytest.mark.parametrize(
    "text",
    [
        accounts(8, refunds=3),  # another message: forwarded headers, a redrive
        '{"queue": "other", "msg_id": 7, "refunds": 3}',
        '{"queue": "q", "msg_id": true, "refunds": 3}',
        '{"refunds": 3}',
        '["q", 7]',
        "nonsense",
    ],
)
def test_foreign_and_malformed_entries_are_ignored(text: str) -> None:
    """A handler that forwards its headers passes no debts on."""
    assert parse_accounts(text, "q", 7, 9) == CLEAN


def test_refunded_deliveries_are_no_attempts() -> None:
    """Attempt = max(1, read_ct - refunds)."""
    stage = Stage().start()
    dispatch = stage.give(row(1, read_ct=4, accounts=accounts(1, refunds=2))).only(c.Dispatch)
    assert (dispatch.attempt, dispatch.deliveries) == (2, 4)


def test_a_refund_is_written_as_an_absolute_value() -> None:
    """Repeating it changes nothing."""
    stage = Stage(queue(concurrency=1)).start()
    stage.run(row(1, read_ct=3, accounts=accounts(1, refunds=1, deaths=1)))
    stage.core._ctx.acks_off = True
    stage.die(stage.look().children[0].child)  # type: ignore[arg-type]
    (item,) = stage.settlements()
    assert isinstance(item.settlement, Release)
    assert json.loads(item.settlement.accounts or "") == {"queue": "q", "msg_id": 1, "refunds": 2, "deaths": 1}


def test_forged_refunds_buy_no_attempts() -> None:
    """More refunds than deliveries cannot be: they count as none, and the next settlement says so."""
    stage = Stage(queue(max_attempts=3)).start()
    forged = accounts(1, refunds=10**9)
    dispatch = stage.run(row(1, read_ct=2, accounts=forged))
    assert dispatch.attempt == 2
    stage.finish(dispatch, FAILURE)
    (item,) = stage.settlements()
    assert item.settlement == Retry(2_000, '{"queue":"q","msg_id":1,"refunds":0,"deaths":0}')


def test_forged_refunds_of_a_message_that_is_only_abandoned_end_too() -> None:
    """Nothing is ever written for it, so its entry stays: it must not count."""
    stage = Stage(queue(max_attempts=3)).start()
    stage.give(row(1, read_ct=4, accounts=accounts(1, refunds=10**9)))
    (item,) = stage.settlements()
    assert isinstance(item.settlement, DeadLetter)


def test_headers_stay_alone_where_no_account_changed() -> None:
    """Most retries rewrite no headers."""
    stage = Stage().start()
    stage.finish(stage.run(row(1, read_ct=3, accounts=accounts(1, refunds=1))), FAILURE)
    (item,) = stage.settlements()
    assert item.settlement == Retry(2_000, None)


def test_an_attempt_that_fails_otherwise_ends_a_row_of_deadlocks() -> None:
    """At most 10 in a row, not in all."""
    stage = Stage().start()
    stage.finish(stage.run(row(1, read_ct=4, accounts=accounts(1, refunds=3, deadlocks=3))), FAILURE)
    (item,) = stage.settlements()
    assert item.settlement == Retry(1_000, '{"queue":"q","msg_id":1,"refunds":3,"deaths":0}')

"""What an error of the driver becomes, by its SQLSTATE and by the moment."""

from __future__ import annotations

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import errors as driver

from shared.errors import (
    Category,
    ConnectionLost,
    DatabaseError,
    OperationTimeout,
    SupervisorError,
    UnsupportedError,
    ValidationError,
)
from shared.pgmq.sqlstate import Moment, NoAnswer, OutcomeUnknown, WriteLate, WriteLost, ends_use, translate

MOMENTS = list(Moment)


def answered(state: str, text: str = "refused") -> SupervisorError:
    """Translate an answer of the server."""
    return translate(driver.lookup(state)(text), "work", Moment.WRITE, of_pgmq=True)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("gone"), psycopg.InterfaceError("closed"), OSError("reset")]
)
def test_a_lost_connection_is_in_doubt_only_where_it_could_have_written(moment: Moment, error: Exception) -> None:
    """Connecting, reading and open transactions are safe to try again; writes and commits are not."""
    ours = translate(error, "work", moment)
    assert isinstance(ours, ConnectionLost)
    assert ours.category is Category.CONNECTION
    doubtful = moment in {Moment.WRITE, Moment.COMMIT}
    assert isinstance(ours, WriteLost) is isinstance(ours, OutcomeUnknown) is doubtful
    assert ours.retryable is not doubtful
    assert ("unknown" in ours.message) is doubtful


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("error", [NoAnswer(), TimeoutError()])
def test_a_missing_answer_is_in_doubt_in_the_same_places(moment: Moment, error: Exception) -> None:
    """The category is timeout; the rest is as for a lost connection."""
    ours = translate(error, "work", moment)
    assert isinstance(ours, OperationTimeout)
    doubtful = moment in {Moment.WRITE, Moment.COMMIT}
    assert isinstance(ours, WriteLate) is doubtful
    assert ours.retryable is not doubtful


@pytest.mark.parametrize("state", ["08000", "08006", "57P01", "57P02", "57P03", "57P05"])
def test_the_server_may_say_that_the_session_is_over(state: str) -> None:
    """Shutdown, crash, starting up, idle too long, and all of class 08."""
    ours = answered(state)
    assert isinstance(ours, WriteLost)
    assert ours.sqlstate == state


@pytest.mark.parametrize("state", ["25P03", "25P04"])
def test_limits_of_a_transaction_end_the_session(state: str) -> None:
    """Idle or long too long: a timeout; before the commit the outcome is known."""
    error = driver.lookup("25P03")("terminating")
    error.sqlstate = state
    ours = translate(error, "work", Moment.TRANSACTION)
    assert isinstance(ours, OperationTimeout)
    assert (ours.retryable, "rolled back" in ours.message) == (True, True)


@pytest.mark.parametrize(
    ("state", "kind", "retryable"),
    [
        ("57014", OperationTimeout, True),
        ("55P03", OperationTimeout, True),
        ("40001", DatabaseError, True),
        ("40P01", DatabaseError, True),
        ("53100", DatabaseError, True),
        ("53200", DatabaseError, True),
        ("25006", DatabaseError, True),
        ("23505", DatabaseError, False),
        ("22P02", DatabaseError, False),
        ("42501", DatabaseError, False),
        ("42P01", DatabaseError, False),
        ("0A000", UnsupportedError, False),
        ("42883", UnsupportedError, False),
        ("3F000", UnsupportedError, False),
        ("P0001", DatabaseError, False),
        ("XX000", DatabaseError, False),
    ],
)
def test_an_answer_is_known_whatever_the_moment(state: str, kind: type[SupervisorError], retryable: bool) -> None:
    """The server refused: nothing was done, and some of it may work later."""
    ours = answered(state)
    assert type(ours) is kind
    assert (ours.sqlstate, ours.operation, ours.retryable) == (state, "work", retryable)


def test_missing_functions_of_others_are_ordinary_errors() -> None:
    """Only in our own statements does a missing function mean that PGMQ is too old."""
    ours = translate(driver.UndefinedFunction("no"), "execute", Moment.TRANSACTION)
    assert type(ours) is DatabaseError


def test_missing_partman_is_unsupported() -> None:
    """PGMQ's own complaint, with a remedy."""
    ours = answered("P0001", "pg_partman is required for partitioned queues")
    assert isinstance(ours, UnsupportedError)
    assert ours.remedy


def test_what_the_driver_refuses_is_the_callers_fault() -> None:
    """No SQLSTATE and no lost connection: it never left."""
    for error in (
        psycopg.ProgrammingError("placeholders"),
        psycopg.DataError("NUL"),
        UnicodeEncodeError("u", "", 0, 1, "x"),
    ):
        assert isinstance(translate(error, "work", Moment.WRITE), ValidationError)


def test_our_own_errors_pass_unchanged() -> None:
    """Nothing is wrapped twice."""
    error = DatabaseError("mine")
    assert translate(error, "work", Moment.WRITE) is error


def test_texts_are_bounded_and_of_one_line() -> None:
    """A server's essay becomes its first line."""
    ours = translate(psycopg.OperationalError("x" * 9000 + "\nmore"), "work", Moment.CONNECT)
    assert len(str(ours)) < 1000
    assert "\n" not in str(ours)
    assert translate(psycopg.OperationalError(""), "work", Moment.READ).message.startswith("OperationalError")


def test_a_server_that_can_no_longer_write_costs_its_connection() -> None:
    """After a failover the session leads to the old primary."""
    assert ends_use(answered("25006"))
    assert not ends_use(answered("40001"))


@given(st.text(alphabet="0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=5, max_size=5), st.sampled_from(MOMENTS))
def test_every_state_has_a_place(state: str, moment: Moment) -> None:
    """Whatever PostgreSQL invents, there is an error, and doubt is never called retryable."""
    error = psycopg.Error("new")
    error.sqlstate = state
    ours = translate(error, "work", moment)
    assert ours.sqlstate == state
    assert not (isinstance(ours, OutcomeUnknown) and ours.retryable)

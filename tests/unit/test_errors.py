"""Errors as values."""

import pytest

from shared import errors
from shared.errors import Category, ConnectionLost, DatabaseError, SupervisorError, ValidationError


def test_an_error_says_what_where_and_what_to_do() -> None:
    """One line has operation, reason, code and remedy."""
    error = DatabaseError("relation is missing", operation="claim", sqlstate="42P01", remedy="run init")
    assert str(error) == "claim: relation is missing (SQLSTATE 42P01) -> run init"
    assert error.fields()["category"] == "database"


def test_a_lost_connection_is_retryable_unless_said_otherwise() -> None:
    """The class has the default, the raiser the last word."""
    assert ConnectionLost("gone").retryable
    assert not ConnectionLost("gone in mid-write", retryable=False).retryable
    assert not DatabaseError("no").retryable


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"Category", "SupervisorError"}))
def test_every_error_has_one_base_and_a_category(name: str) -> None:
    """One `except SupervisorError` catches what we raise."""
    kind = getattr(errors, name)
    assert issubclass(kind, SupervisorError)
    assert kind("x").category in Category


def test_a_bad_value_is_a_value_error_too() -> None:
    """Users need not know our types to catch a bad argument."""
    assert issubclass(ValidationError, ValueError)

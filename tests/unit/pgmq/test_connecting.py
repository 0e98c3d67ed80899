"""From what a caller gives to what libpq gets."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from shared.errors import ValidationError
from shared.pgmq.connecting import Settings, settings
from shared.pgmq.libpq import refuses_options

LIMITS: dict[str, Any] = {
    "pool_size": 4,
    "acquire_timeout": "1s",
    "connect_timeout": "10s",
    "statement_timeout": "30s",
    "application_name": "mine",
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without libpq's variables."""
    for name in ("PGSERVICE", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGOPTIONS"):
        monkeypatch.delenv(name, raising=False)


def made(dsn: str = "", libpq: dict[str, Any] | None = None, **more: Any) -> Settings:
    """Check what is given."""
    return settings(dsn, libpq or {}, **{**LIMITS, **more})


def given_to_libpq(checked: Settings, *, plain: bool = False) -> dict[str, Any]:
    """Read the parameters that a connection is made with."""
    return dict(conninfo_to_dict(checked.conninfo(plain=plain)))


def test_ours_fill_the_gaps() -> None:
    """Keepalives, a name, a limit to connect, a limit for statements."""
    found = given_to_libpq(made("host=db dbname=x"))
    assert (found["host"], found["dbname"], found["application_name"]) == ("db", "x", "mine")
    assert (found["connect_timeout"], found["tcp_user_timeout"], found["client_encoding"]) == ("10", "10000", "utf8")
    assert found["options"] == "-c statement_timeout=30000"


def test_the_callers_win() -> None:
    """In the DSN and as arguments, TLS included; only the encoding is ours."""
    dsn = "postgresql://u:p@a,b:7/x?sslmode=verify-full&keepalives=0&application_name=theirs&client_encoding=latin1"
    found = given_to_libpq(made(dsn, {"sslrootcert": "/ca.pem", "connect_timeout": 3, "options": "-c work_mem=1MB"}))
    assert (found["sslmode"], found["sslrootcert"], found["keepalives"]) == ("verify-full", "/ca.pem", "0")
    assert (found["application_name"], found["connect_timeout"], found["client_encoding"]) == ("theirs", "3", "utf8")
    assert found["options"] == "-c statement_timeout=30000 -c work_mem=1MB"
    assert (found["host"], found["password"]) == ("a,b", "p")


def test_libpqs_environment_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it says something, we say nothing; options are joined."""
    monkeypatch.setenv("PGAPPNAME", "env")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "9")
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=2MB")
    found = given_to_libpq(made())
    assert "application_name" not in found
    assert "connect_timeout" not in found
    assert found["options"] == "-c statement_timeout=30000 -c work_mem=2MB"


def test_a_service_file_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit parameters would beat it, so there are none of ours."""
    assert set(given_to_libpq(made("service=prod"))) == {"service", "client_encoding", "options"}
    monkeypatch.setenv("PGSERVICE", "prod")
    assert "keepalives" not in given_to_libpq(made())


def test_poolers_and_those_without_limits_get_no_options() -> None:
    """The caller's own stay."""
    assert "options" not in given_to_libpq(made(), plain=True)
    assert given_to_libpq(made("", {"options": "-c a.b=1"}), plain=True)["options"] == "-c a.b=1"
    unlimited = made(statement_timeout=None)
    assert "options" not in given_to_libpq(unlimited)
    assert unlimited.answer_timeout_s is None
    assert made(statement_timeout="30s").answer_timeout_s == 35


@pytest.mark.parametrize(
    "bad",
    [
        {"pool_size": 0},
        {"pool_size": 1001},
        {"pool_size": True},
        {"pool_size": "4"},
        {"acquire_timeout": -1},
        {"connect_timeout": "soon"},
        {"statement_timeout": 0},
    ],
)
def test_impossible_limits_are_refused(bad: dict[str, Any]) -> None:
    """Before anything is connected to."""
    with pytest.raises(ValidationError):
        made(**bad)


@pytest.mark.parametrize("dsn", ["postgresql://u:secret@[h/x", "host='secret", "password=secret nonsense"])
def test_a_dsn_that_cannot_be_read_is_not_repeated(dsn: str) -> None:
    """It may hold a password."""
    with pytest.raises(ValidationError) as caught:
        made(dsn)
    assert "secret" not in repr(caught.value.fields()) + str(caught.value)


def test_unknown_parameters_are_named() -> None:
    """A misspelt one is not passed on."""
    with pytest.raises(ValidationError, match="sslmodus"):
        made("", {"sslmodus": "require"})


def test_a_poolers_refusal_is_recognised() -> None:
    """In the words of PgBouncer."""
    assert refuses_options("FATAL: unsupported startup parameter: options")
    assert not refuses_options("connection refused")

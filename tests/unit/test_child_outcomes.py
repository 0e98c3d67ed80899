"""How a handler's end is told, and which callables are handlers."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from child.attempts import tally
from child.loader import LoadError, load_handler
from child.outcomes import describe, find_sqlstate, of_exception, of_return
from child.results import fit_result
from child.verdicts import InvalidMessage, Retry, Stopped
from shared.wire.frames import MAX_META_BYTES, Decoder, Kind


def caught(error: BaseException, **options: Any) -> dict[str, Any]:
    """The outcome of a handler that raised `error`."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - the test raises anything
        return of_exception(raised, **{"stopping": False, **options})


class Exits(BaseException):
    """Exits wherever it is looked at."""

    def __getattribute__(self, name: str) -> NoReturn:
        """Exit."""
        sys.exit(1)

    def __str__(self) -> str:  # noqa: PLE0307 - it never does
        """Exit."""
        sys.exit(1)

    __repr__ = __str__


class Liar:
    """Claims to be a verdict."""

    @property
    def __class__(self) -> Any:
        """Lie, or exit."""
        sys.exit(1)


def test_looking_at_an_exception_never_raises() -> None:
    """Attributes that exit, text that exits, a class that lies."""
    outcome = caught(Exits())
    assert outcome["kind"] == "error"
    assert outcome["error"]["type"].endswith("Exits")
    assert of_return(Liar(), None) is None


async def _never_awaited() -> None: ...


async def _never_iterated() -> Any:
    yield


async def _never_iterated_with(*_: object) -> Any:
    yield


@pytest.mark.parametrize("make", [lambda: (n for n in "abc"), _never_iterated, _never_awaited])
def test_code_that_nobody_has_run_is_no_success(make: Callable[[], Any]) -> None:
    """A generator behind a decorator, or a coroutine that was not awaited: the work did not happen."""
    returned = make()
    outcome = of_return(returned, None)
    assert outcome is not None
    assert (outcome["kind"], outcome["error"]["type"]) == ("error", "NothingRun")
    if inspect.iscoroutine(returned):
        returned.close()


def test_stopped_is_believed_only_when_a_stop_was_asked_for() -> None:
    """Raised out of the blue it is an ordinary failure."""
    assert caught(Stopped("x"))["kind"] == "error"
    assert caught(Stopped("x"), stopping=True)["kind"] == "stopped"


def test_a_group_of_one_is_that_one() -> None:
    """What the only task of a task group raised counts, at any depth; of two, neither."""
    verdict = Retry({"kind": "retry"}, "retry")
    assert caught(ExceptionGroup("a", [ExceptionGroup("b", [verdict])])) == {"kind": "retry"}
    assert caught(ExceptionGroup("a", [InvalidMessage("x")]))["kind"] == "invalid_message"
    assert caught(ExceptionGroup("a", [verdict, ValueError()]))["kind"] == "error"


def test_deep_groups_and_long_chains_are_described() -> None:
    """A thousand levels, and a ring."""
    group: Exception = ValueError("inside")
    for _ in range(3000):
        group = ExceptionGroup("deeper", [group])
    assert caught(group)["kind"] == "error"
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert "ValueError: a" in caught(first)["error"]["traceback"]


def test_sqlstate_is_found_by_attribute() -> None:
    """On the error, on what an ORM wrapped, on its cause; nonsense is none."""

    class Wrapped(Exception):
        def __init__(self, **attributes: object) -> None:
            super().__init__()
            self.__dict__.update(attributes)

    deadlock = Wrapped(sqlstate="40P01")
    chained = RuntimeError()
    chained.__cause__ = deadlock
    for error in (deadlock, Wrapped(orig=deadlock), chained):
        assert find_sqlstate(error) == "40P01"
    for error in (ValueError(), Wrapped(sqlstate=5), Wrapped(sqlstate="too long"), Wrapped(sqlstate="'; --")):
        assert find_sqlstate(error) is None
    ring = Wrapped()
    ring.orig = ring  # type: ignore[attr-defined]
    assert find_sqlstate(ring) is None


def test_a_long_traceback_keeps_both_ends() -> None:
    """The beginning, and the end where the error is."""
    try:
        exec("x = 1\n" * 10 + "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(200)", {})  # noqa: S102 - makes frames
    except ZeroDivisionError as error:
        text = describe(error, error.__traceback__)["traceback"]
    assert text.startswith("Traceback")
    assert text.rstrip().endswith("division by zero")


def test_an_outcome_always_fits_into_a_frame() -> None:
    """Escapes of JSON make six bytes of one."""
    text = "\x01" * 65_536
    outcome = {"kind": "error", "error": {"type": "T", "message": text, "traceback": text}, "reason": text}
    (frame,) = Decoder().feed(fit_result(Kind.RESULT, 1, outcome))
    assert frame.meta["kind"] == "error"
    assert len(json.dumps(frame.meta)) <= MAX_META_BYTES


@pytest.mark.parametrize(
    ("accounts", "owed", "attempt"),
    [
        (None, [], 5),
        ('{"queue": "q", "msg_id": 7, "refunds": 2}', [], 3),
        ('{"queue": "q", "msg_id": 7, "refunds": 2}', [[7, 3, 1], [8, 9, 0]], 6),
        ('{"queue": "q", "msg_id": 7, "refunds": 1000}', [], 5),
        ('{"queue": "q", "msg_id": 7, "refunds": -3}', [], 5),
        ('{"queue": "other", "msg_id": 7, "refunds": 2}', [], 5),
        ('{"queue": "q", "msg_id": 8, "refunds": 2}', [], 5),
        ('{"queue": "q", "msg_id": true, "refunds": 2}', [], 5),
        ('{"queue": "q", "msg_id": 7, "refunds": true}', [], 5),
        ("[1]", [], 5),
        ("{", [], 5),
    ],
)
def test_attempts_in_transactional_mode(accounts: str | None, owed: list[object], attempt: int) -> None:
    """read_ct 5 of message 7, with what its entry says if it is its own."""
    assert tally(read_ct=5, accounts=accounts, queue="q", msg_id=7, owed=owed).attempt == attempt


def test_deaths_that_are_owed_count() -> None:
    """So that a message that has had all its deaths is not run once more."""
    accounts = '{"queue": "q", "msg_id": 7, "deaths": 1}'
    assert tally(read_ct=5, accounts=accounts, queue="q", msg_id=7, owed=[[7, 2, 2], [8, 1, 1]]).deaths == 3


def test_attempts_agree_with_the_supervisor() -> None:
    """Both sides read the same entry alike."""
    from supervisor.core.accounts import parse_accounts

    for refunds in (0, 1, 4, 5, 10**9, -1, True, "2", None, 1.5):
        entry = json.dumps({"queue": "q", "msg_id": 7, "refunds": refunds})
        theirs = parse_accounts(entry, "q", 7, 5).attempt(5)
        assert tally(read_ct=5, accounts=entry, queue="q", msg_id=7, owed=[]).attempt == theirs
        entry = json.dumps({"queue": "q", "msg_id": 7, "deaths": refunds})
        assert (
            tally(read_ct=5, accounts=entry, queue="q", msg_id=7, owed=[]).deaths
            == parse_accounts(entry, "q", 7, 5).deaths
        )


class Service:
    """A class with handlers."""

    def method(self, message: object) -> None:
        """Take a message."""

    async def __call__(self, message: object) -> None:
        """Take a message."""


service = Service()
bound = service.method
filled = functools.partial(lambda *both: both, 1)


@pytest.mark.parametrize("name", ["service", "bound", "filled", "service.method", "Service.__call__"])
def test_many_things_are_callable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances, bound methods, partial objects, dotted names."""
    monkeypatch.setitem(sys.modules, "some_handlers", sys.modules[__name__])
    mode = "transactional" if name == "Service.__call__" else "regular"
    assert callable(load_handler(f"some_handlers:{name}", mode))


partial_generator = functools.partial(_never_iterated_with, 1)


def test_a_generator_is_no_handler_whatever_it_is_wrapped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial of an async generator is refused at start."""
    monkeypatch.setitem(sys.modules, "some_handlers", sys.modules[__name__])
    with pytest.raises(LoadError, match="has a yield"):
        load_handler("some_handlers:partial_generator", "regular")


def test_the_reason_names_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in the module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LoadError, match=str(tmp_path)) as caught_error:
        load_handler("a_module_with_a_typo:handle", "regular")
    assert caught_error.value.kind == "missing"

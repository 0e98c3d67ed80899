"""pytest fixtures for applications whose handlers run under pgmq-supervisor.

    pgmq_database     DSN of a fresh database with PGMQ, on an embedded server that lives as long as the session
    pgmq_supervisor   start a supervisor on a handler: pgmq_supervisor("tasks:handle", mode="regular", app_dir=...)
    pgmq_sync         sync points: hold supervisor or child at a point, kill it there
    run_handler       call a handler with a message made by hand; no process, and a database only where it has `tx`

Imports nothing before a fixture is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from crashtests.ground import Ground
    from crashtests.rendezvous import Rendezvous
    from crashtests.testing import HandlerOutcome, Supervisor


@pytest.fixture(scope="session")
def pgmq_server() -> Iterator[Ground]:
    """An embedded PostgreSQL in a temporary folder; nothing in it has to survive this machine."""
    from crashtests.ground import ground  # noqa: PLC0415 - see above

    with ground({"fsync": "off", "full_page_writes": "off"}, prepare=lambda _: None) as place:
        yield place


@pytest.fixture
def pgmq_database(pgmq_server: Ground) -> Iterator[str]:
    """The DSN of a fresh database with PGMQ in it; dropped after the test."""
    with pgmq_server.database() as dsn:
        yield dsn


@pytest.fixture
def pgmq_sync() -> Iterator[Rendezvous]:
    """Sync points for the supervisors of this test: `pgmq_sync.trap("child.handler.before")`, then `.wait(10)`."""
    from crashtests.ground import private_folder  # noqa: PLC0415 - see above
    from crashtests.rendezvous import Rendezvous  # noqa: PLC0415 - see above

    with private_folder("sync") as folder, contextlib.closing(Rendezvous(folder)) as points:
        yield points


@pytest.fixture
def pgmq_supervisor(pgmq_database: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Supervisor]]:
    """Start supervisors on handlers; what still runs at the end of the test is killed.

    Their sync points are on where the test asks for `pgmq_sync` too. Options of the queue are keyword arguments.
    """
    from crashtests.ground import private_folder  # noqa: PLC0415 - see above
    from crashtests.testing import Supervisor  # noqa: PLC0415 - see above

    points = request.getfixturevalue("pgmq_sync") if "pgmq_sync" in request.fixturenames else None
    with contextlib.ExitStack() as stack:

        def start(handler: str, *, app_dir: Path | str | None = None, **options: Any) -> Supervisor:
            folder = stack.enter_context(private_folder("test"))
            where = None if app_dir is None else Path(app_dir)
            made = Supervisor(folder, pgmq_database, handler, app_dir=where, points=points, **options)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def run_handler(request: pytest.FixtureRequest) -> Callable[..., HandlerOutcome]:
    """Call a handler: `run_handler(handle, {"id": 7}, attempt=2)`; one with `tx` works in `pgmq_database`."""
    from crashtests import testing  # noqa: PLC0415 - see above

    def run(handler: Callable[..., Any], body: object = None, **options: Any) -> HandlerOutcome:
        given = body if isinstance(body, testing.Message) else testing.Message(body, **options)
        dsn = request.getfixturevalue("pgmq_database") if _takes_tx(handler) else None
        return testing.run_handler(handler, given, dsn=dsn)

    return run


def _takes_tx(handler: Callable[..., Any]) -> bool:
    """Whether it is transactional: called with two arguments."""
    required = [
        found
        for found in inspect.signature(handler).parameters.values()
        if found.kind in (found.POSITIONAL_ONLY, found.POSITIONAL_OR_KEYWORD) and found.default is found.empty
    ]
    return len(required) > 1

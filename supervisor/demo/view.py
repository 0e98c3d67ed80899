"""What the demo shows: a live table on a terminal, a line a second elsewhere, and the account at the end."""

from __future__ import annotations

import subprocess
import time
from typing import Any, Final

import psycopg
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from supervisor.demo.account import Account, take_account
from supervisor.demo.plan import EVERY_KIND

_LOOK_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 1.0
_ROOMY: Final = 140  # columns
_DOES: Final = {kind.name: kind.does for kind in EVERY_KIND}


def watch(
    console: Console,
    connection: psycopg.Connection[Any],
    sent: dict[str, int],
    service: subprocess.Popen[bytes],
    *,
    live: bool,
    patience_s: float,
) -> Account:
    """Look until every message is accounted for, the service ends, or patience does."""
    began = time.monotonic()
    account = take_account(connection, sent)
    said_at = 0.0
    with Live(console=console, refresh_per_second=8, transient=True) if live else _Nothing() as screen:
        while not account.closed and service.poll() is None and time.monotonic() - began < patience_s:
            time.sleep(_LOOK_EVERY_S)
            account = take_account(connection, sent)
            took = time.monotonic() - began
            if isinstance(screen, Live):
                screen.update(Group(_bar(account, took), _table(account, console.width)))
            elif not account.closed and took - said_at >= _LINE_EVERY_S:
                said_at = took
                console.print(_status(account, took))
    console.print(_status(account, time.monotonic() - began))
    return account


def show_account(console: Console, account: Account, code: int, daemons: list[int], *, plain: bool) -> None:
    """Every kind by name: how many ended how, and for the bad ones why and where."""
    if plain:
        for row in _rows(account):
            console.print("  " + "  ".join(row), markup=False, soft_wrap=True)
    else:
        console.print(_table(account, console.width))
    console.print(f"retried {account.retried} times; the service stopped with exit code {code}")
    if daemons:
        console.print(f"daemons of handlers still alive: {daemons}")
    else:
        console.print("no process of a handler is left")


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _status(account: Account, took_s: float) -> str:
    return (
        f"{took_s:5.1f} s  succeeded {account.succeeded}  dead-lettered {account.dead_lettered}  "
        f"retried {account.retried}  left {account.left}"
    )


def _bar(account: Account, took_s: float) -> Group:
    done = account.succeeded + account.dead_lettered
    return Group(Text(_status(account, took_s)), ProgressBar(total=max(1, account.sent), completed=done, width=60))


def _rows(account: Account) -> list[tuple[str, ...]]:
    return [
        (
            f"{fate.kind:12}",
            f"{_DOES[fate.kind]:36}",
            f"sent={fate.sent}",
            f"succeeded={fate.succeeded}",
            f"dead_lettered={fate.dead_lettered}",
            f"retried={fate.retried}",
            " ".join(sorted(fate.reasons)),
            fate.how,
        )
        for fate in account.fates.values()
    ]


def _table(account: Account, width: int) -> Table:
    """One line a kind; what does not fit into `width` columns is cut, beginning with what is known from elsewhere."""
    table = Table(box=None, padding=(0, 1))
    roomy = width >= _ROOMY
    taken = 98 if roomy else 60  # by the columns before the last one
    table.add_column("message", no_wrap=True)
    if roomy:
        table.add_column("what it does", no_wrap=True)
    for title in ("sent", "ok", "dead", "retried"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("how it ended", no_wrap=True, overflow="ellipsis", max_width=max(10, width - taken))
    for fate in account.fates.values():
        numbers = (fate.sent, fate.succeeded, fate.dead_lettered, fate.retried)
        table.add_row(
            fate.kind,
            *([_DOES[fate.kind]] if roomy else []),
            *map(str, numbers),
            " ".join(sorted(fate.reasons)),
            Text(fate.how),
        )
    return table

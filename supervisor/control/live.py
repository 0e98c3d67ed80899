"""The status document as tables, once or live. Rates are differences of two documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from supervisor.control.client import ControlError

_EVERY_S: Final = 1.0
_CHILDREN_SHOWN: Final = 40
_DEATHS_SHOWN: Final = 8
Document = Mapping[str, Any]


def print_once(document: Document) -> None:
    """Print the document; in a pipe wide enough that nothing is cut."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200, no_color=True)
    console.print(render(document, None))


def show_live(fetch: Callable[[], Document]) -> int:
    """Show the document until Ctrl-C, which is no error, or until the supervisor is gone, which is said."""
    before: Document | None = None
    document = fetch()
    console = Console(highlight=False)
    try:
        with Live(render(document, None), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_S)
                before, document = document, fetch()
                live.update(render(document, before), refresh=True)
    except KeyboardInterrupt:
        return 0
    except ControlError:
        console.print(render(document, before))
        raise


def render(document: Document, before: Document | None) -> RenderableType:
    """Build the whole view."""
    parts: list[RenderableType] = [_headline(document), _queues(document, before), _children(document)]
    if document.get("recent_deaths"):
        parts.append(_deaths(document["recent_deaths"]))
    return Group(*parts)


def _headline(document: Document) -> Text:
    line = Text.assemble(
        (_clean(document["supervisor"]), "bold"),
        f"  pid {document['pid']}  {document['state']}  up {duration(document['uptime_s'])}",
        f"  version {document['version']}",
    )
    if document.get("reloading"):
        line.append("  reloading", "yellow")
    for reason in document.get("reasons", ()):
        line.append(f"\n! {_clean(reason)}", "red")
    return line


def _queues(document: Document, before: Document | None) -> Table:
    table = _table("queue", "state", "children", "running", "held", "visible", "oldest", "ok/s", "retry/s", "ok",
                   "retried", "dead letters", "deaths", numbers_from=2)  # fmt: skip
    for name, queue in document["queues"].items():
        counters = queue["counters"]
        children = queue["children"]
        able = sum(1 for child in children if child["state"] in {"idle", "busy", "reserved"})
        visible = queue["visible"]
        table.add_row(
            _clean(name),
            _state(queue),
            f"{able}/{queue['concurrency']}",
            str(sum(1 for child in children if child["msg_id"] is not None)),
            str(queue["pending"]),
            "-" if visible is None else f"{visible}{'+' if queue['visible_at_limit'] else ''}",
            duration(queue["oldest_visible_s"]),
            _rate(document, before, name, "succeeded"),
            _rate(document, before, name, "retried"),
            str(counters["succeeded"]),
            str(counters["retried"]),
            str(counters["dead_lettered"]),
            str(counters["deaths"]),
        )
    return table


def _children(document: Document) -> Table:
    table = _table("queue", "slot", "pid", "state", "message", "attempt", "running", "memory", "done", "progress")
    rows = [(name, child) for name, queue in document["queues"].items() for child in queue["children"]]
    rows.sort(key=lambda row: -(row[1]["running_s"] or 0.0))
    for name, child in rows[:_CHILDREN_SHOWN]:
        state = child["state"] + (f" ({child['stop_reason']})" if child["stop_reason"] else "")
        role = "" if child["role"] == "active" else f" {child['role']}"
        table.add_row(
            _clean(name),
            f"{child['slot']}{role}",
            str(child["pid"] or "-"),
            _clean(state),
            str(child["msg_id"] or "-"),
            str(child["attempt"] or "-"),
            duration(child["running_s"]),
            _size(child["memory_bytes"]),
            str(child["messages"]),
            _clean(child["progress"] or "")[:60],
        )
    if len(rows) > _CHILDREN_SHOWN:
        table.caption = f"{len(rows) - _CHILDREN_SHOWN} more children"
    return table


def _deaths(deaths: Sequence[Document]) -> Table:
    table = _table("died at", "queue", "slot", "cause", "signal/exit", "message", "attempt", "peak", "last output")
    for death in deaths[:_DEATHS_SHOWN]:
        ending = death["signal"] or ("-" if death["exit_code"] is None else f"exit {death['exit_code']}")
        tail = str(death["output_tail"]).strip().rpartition("\n")[2]
        table.add_row(
            datetime.fromtimestamp(death["at"], tz=UTC).astimezone().strftime("%H:%M:%S"),
            _clean(death["queue"]),
            str(death["slot"]),
            _clean(death["cause"]),
            _clean(ending),
            str(death["msg_id"] or "-"),
            str(death["attempt"] or "-"),
            _size(death["max_rss_kb"] * 1024),
            _clean(tail)[:60],
        )
    return table


def _table(*titles: str, numbers_from: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        right = numbers_from is not None and number >= numbers_from
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    return table


def _state(queue: Document) -> Text:
    if queue["parked"]:
        return Text("parked", "red")
    if queue["paused"]:
        return Text("paused", "yellow")
    return Text("ready", "green") if queue["not_ready_because"] is None else Text("not ready", "red")


def _rate(document: Document, before: Document | None, queue: str, counter: str) -> str:
    if before is None or queue not in before["queues"]:
        return "-"
    seconds = document["time"] - before["time"]
    if seconds <= 0:
        return "-"
    grown = document["queues"][queue]["counters"][counter] - before["queues"][queue]["counters"][counter]
    return f"{grown / seconds:.0f}" if grown >= 10 * seconds else f"{grown / seconds:.1f}"


def duration(seconds: float | None) -> str:
    """Write an age the way one reads it: 0.4s, 12s, 3m10s, 2h05m, 3d4h."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 172_800:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


def _size(number: float | None) -> str:
    return "-" if not number else f"{number / (1 << 20):.0f}MB"


def _clean(text: object) -> str:
    """Make a text safe for a terminal: a handler chooses some of them."""
    return "".join(char if char.isprintable() else "?" for char in str(text))

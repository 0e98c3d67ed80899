"""The page docs/performance.md: what `make bench` measured, as ratios of two measurements of one run."""

from __future__ import annotations

from typing import Any

_HEAD = """# Performance

What killable processes cost, and what is left when they die. Every line compares two measurements of one run on one
server with durable settings: seconds differ from machine to machine, ratios less so. Written by
`make bench ARGS="--page docs/performance.md"`; `make bench` measures on your machine.

Run of {at}, Python {python}, {machine}, {cpus} CPUs for client, server and children together.

| what | compared with | absolute | ratio |
|---|---|---|---|
"""

_TAIL = """
- Handlers that do nothing are the worst case: all that is left is the way from the database to a process and back. A
  handler of 10 ms hides it.
- The bare loop takes and deletes a hundred messages a statement in one process, without a lease that is renewed, a
  retry or a limit: what one connection can do at best.
- For handlers that do nothing the processors are the limit, not the number of children.
- `standby = 1` keeps a booted process ready for the next death.
- In transactional mode each message is a transaction of its own, here as there.

How long limits take to be kept is in [limits](limits.md).
"""


def to_markdown(results: dict[str, Any]) -> str:
    """Write the page. Raises `KeyError` where a benchmark that it needs was not run."""
    rows: list[tuple[str, str, str, float]] = []
    throughput = results["throughput"]
    bare = f"one loop of `pgmq.read(100)` and `pgmq.delete(100)`, {throughput['bare_loop']['messages_per_s']} a second"
    for concurrency in (2, 8):
        found = throughput[f"concurrency {concurrency}"]
        what = f"regular mode, {concurrency} children, handlers that do nothing"
        rows.append((what, bare, f"{found['messages_per_s']} messages a second", found["ratio_to_bare"]))
    for connections in (4, 8):
        found = results["transactional"][f"{connections} connections"]
        what = f"transactional mode, {connections} children, handlers that do nothing"
        bare = f"{connections} processes that begin, read, delete and commit, {found['bare_per_s']} a second"
        rows.append((what, bare, f"{found['transactions_per_s']} messages a second", found["ratio_to_bare"]))
    found = results["latency"]
    bare = f"one process that listens and reads, {found['bare_median_ms']} ms"
    absolute = f"{found['median_ms']} ms; 95 of 100 within {found['p95_ms']} ms"
    rows.append(("idle worker, from the commit of a send to the handler", bare, absolute, found["ratio_to_bare"]))
    for standby in (0, 1):
        found = results["deaths"][f"standby {standby}"]
        what = f"2 % of the messages kill their process, 10 ms handlers, 8 children, `standby = {standby}`"
        bare = f"the same without deaths, {found['undisturbed_per_s']} a second"
        restart = f"{found['death_to_next_start_median_ms']} ms from a death to the next start in its slot"
        rows.append((what, bare, f"{found['with_deaths_per_s']} messages a second; {restart}", found["ratio"]))
    found = results["scrapes"]
    what = f"`/metrics` scraped {found['scrapes_per_s']} times a second, 2 ms handlers, 8 children"
    rows.append((what, "the same without", "", found["ratio"]))
    return _HEAD.format(**results) + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows) + _TAIL

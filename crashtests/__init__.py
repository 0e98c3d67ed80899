"""The crash-test harness: every boundary of the failure model is crossed with a real kill, from outside.

    generator ──▶ what is sent, and when what is killed (a seed is a story)
    stage ──────▶ a supervisor as its users run it, on a database and in a folder of its own
    rendezvous ─▶ holds a process at a sync point        nemesis ──▶ kills what stands there, or what does not
    proxy ──────▶ cuts, freezes and swallows what goes between supervisor and PostgreSQL
    ledger ─────▶ fsynced external effects of handlers, business rows, archive, what is left
    checker ────▶ lost, repeated, half-done, acknowledged without having been done: ok, fail or unknown
    results ────▶ docs/verification.md

`python -m crashtests run` does the same to a handler of yours. See docs/crash-testing.md.
"""

"""The core decides: events in, commands out. No clock, no I/O, no randomness of its own.

`Core.handle(event, now)` returns commands; `Core.next_deadline()` says when to call again without an event;
`Core.snapshot()` is what status, top and /api/status show. All policy of the product lives in this package.
"""

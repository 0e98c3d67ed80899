"""The child: a process that runs handlers and may be killed at any instruction. Kept empty: importing it costs nothing.

process: first instants (descriptors, death with the parent, signals, stack dumps). bootstrap: HELLO, imports, READY,
and which loop to enter. loader: "module:function" to a callable, or a typed reason why not. channel: frames on the
private pipes. regular: one message at a time, settled by the parent. transactional, transaction, database: one
message at a time, inside a transaction that the child owns. message: what a handler is given. caller: the boundary
around it. outcomes: how it ended, as the parent is told. farewell: every way to leave.
"""

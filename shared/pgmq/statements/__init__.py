"""The one place where SQL stands: every statement on queues, composed once for each queue.

Queue names become quoted identifiers, values are parameters, and every statement says what it locks. None of them
depends on the state of a session, so that all work behind a transaction pooler, and none is worth preparing: a plan
that was made while a queue was empty would outlive its growth to a million rows.
"""

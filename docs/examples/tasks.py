"""Handlers are plain functions in a plain module; nothing of pgmq-supervisor has to be imported."""

import time


class CardRefused(Exception):
    """No retry will mend this: an exception with a true `permanent` is dead-lettered at once."""

    permanent = True


def handle_order(message):
    """Regular mode. Returning means success, raising means retry by policy."""
    order = message.body
    if order["total"] < 0:
        return message.dead_letter("negative total")
    if order.get("not_before", 0) > time.time():
        return message.retry(after="30s")
    for step in range(order.get("steps", 1)):
        message.raise_if_stopped()  # at shutdown the message is given back, uncharged
        message.progress(f"step {step + 1}")
    message.log.info("order %s handled, attempt %s", order["id"], message.attempt)
    return None


def handle_payment(message, tx):
    """Transactional mode. What is done with `tx` and the acknowledgement commit together, or not at all."""
    payment = message.body
    if payment["amount"] <= 0:
        raise CardRefused(f"amount {payment['amount']}")
    tx.execute("create table if not exists payments (id bigint primary key, amount numeric not null)")
    tx.execute("insert into payments values (%s, %s)", [payment["id"], payment["amount"]])
    tx.send("orders", {"id": payment["id"], "total": payment["amount"]})

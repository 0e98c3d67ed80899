"""The examples of docs/handlers.md, run by a supervisor as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.running import stage

PAGE = Path(__file__).parents[2] / "docs" / "handlers.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What is sent to each example, and what must become of it: a reason, or None where it succeeds.
FATES: dict[str, list[tuple[object, str | None]]] = {
    "ship": [({"id": 1, "total": 5}, None), ({"id": 2, "total": -1}, "rejected")],
    "import_file": [({"path": "x"}, None)],
    "convert": [({"currency": "EUR"}, None), ({"currency": "XXX"}, "failed")],
    "export": [({"pages": 3}, None)],
    "notify": [({}, None)],
    "pay": [({"id": 1, "amount": 3}, None), ({"id": 2, "amount": 0}, "failed")],
    "count_words": [("to be or not to be", None)],
    "refund": [({"id": 77}, "rejected")],
    "book": [({"id": 5}, None), ({"id": None}, "attempts_exhausted")],
}
TRANSACTIONAL = {"pay", "count_words", "refund", "book"}


def _configuration() -> str:
    sections = []
    for name in FATES:
        mode = "transactional" if name in TRANSACTIONAL else "regular"
        sections.append(f'[queues.{name}]\nhandler = "tasks:{name}"\nmode = "{mode}"\non_success = "archive"\n')
        if name == "book":
            sections.append("max_attempts = 1\n")  # what it cannot book it cannot book
    return "\n".join(sections)


def test_every_example_does_what_the_page_says(tmp_path: Path, database: str) -> None:
    """Each handler of the page gets a message or two; successes are archived, the others have the right reason."""
    tasks = "\n".join(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    assert set(re.findall(r"^(?:async )?def (\w+)\(message", tasks, re.MULTILINE)) == set(FATES)
    with stage(tmp_path, database, _configuration(), tasks) as on:
        on.create(*FATES, "receipts")
        on.connection.execute("create table payments (id bigint primary key, amount numeric not null)")
        on.connection.execute("create table words (word text)")
        on.connection.execute("create table documents (id bigint primary key)")
        on.connection.execute("insert into documents values (1)")
        for name, messages in FATES.items():
            on.send(*(body for body, _ in messages), queue=name)
        on.service.start()
        for name, messages in FATES.items():
            on.until_empty(name)
            reasons = [letter["reason"] for letter in on.letters(name)]
            assert reasons == [reason for _, reason in messages if reason is not None], name
            assert len(on.archived(name)) == sum(reason is None for _, reason in messages), name
        assert on.service.stop() == 0
        assert on.rows("select id from payments order by id") == [(1,), (5,)]
        assert "NotNullViolation" in on.letters("book")[0]["error"]["message"]
        assert on.rows("select count(*) from words") == [(6,)]
        assert on.rows("select message from pgmq.q_receipts") == [({"payment": 1},)]
        assert {line["message"] for line in on.events("child.log")} >= {"document 1 was known"}

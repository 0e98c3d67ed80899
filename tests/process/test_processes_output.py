"""Output of handlers: line by line, with the message it belongs to, and never more than the loop can bear."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from supervisor.core.types import SUCCESS
from tests.support.processes import spec_for, world


async def test_lines_belong_to_their_message(tmp_path: Path) -> None:
    """Also when results and dispatches follow each other at once, and the last line has no end."""
    source = "import sys\ndef handle(message): print('a', message.body); sys.stdout.write(f'b {message.body}')"
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        for number in range(50):
            claim = it.dispatch(child, str(number).encode())
            await it.finished(claim)
            assert it.output_of(claim) == [f"a {number}", f"b {number}"]
        assert it.output_of(None) == []


async def test_output_of_c_code_and_helpers_is_captured(tmp_path: Path) -> None:
    """Whatever writes to descriptor 1 or 2 counts."""
    source = "import os, subprocess\ndef handle(message): os.write(2, b'raw\\n'); subprocess.run(['echo', 'helper'])"
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        await it.finished(claim)
        assert it.output_of(claim) == ["raw", "helper"]


async def test_output_of_an_import_belongs_to_no_message(tmp_path: Path) -> None:
    """What is printed before a message is in hand is told without one."""
    async with world(spec_for(tmp_path, "print('hello')\ndef handle(message): ...")) as it:
        child = await it.ready()
        await it.finished(it.dispatch(child))
        assert it.output_of(None) == ["hello"]


async def test_strange_bytes_and_long_lines_are_bounded(tmp_path: Path) -> None:
    """Invalid UTF-8 is replaced; a line is cut at 8 KiB and says so."""
    source = "import os\ndef handle(message): os.write(1, b'\\xff\\n' + b'x' * 50_000 + b'\\nnext\\r\\n')"
    async with world(spec_for(tmp_path, source)) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        await it.finished(claim)
        strange, long, following = it.output_of(claim)
        assert strange == "\ufffd"
        assert long == "x" * 8192 + " ... [cut]"
        assert following == "next"


async def test_a_flood_harms_neither_the_loop_nor_other_children(tmp_path: Path) -> None:
    """A hundred megabytes of lines, and a hundred without one: counted, not told; the others go on."""
    source = """
        import os
        def handle(message):
            line = (b'y' * 99 + b'\\n') * 10_000 if message.body == 1 else b'z' * 1_000_000
            if message.body:
                for _ in range(100): os.write(1, line)
            print('end')
    """
    async with world(spec_for(tmp_path, source)) as it:
        flood, calm = await it.ready(), await it.ready()
        for kind in (b"1", b"2"):
            claim = it.dispatch(flood, kind)
            longest, runs = 0.0, 0
            while it.outcome(claim) is None:
                began = time.monotonic()
                assert await it.finished(it.dispatch(calm, b"0")) == SUCCESS
                longest, runs = max(longest, time.monotonic() - began), runs + 1
                await asyncio.sleep(0)
            assert runs > 5
            assert longest < 0.3
            assert len(it.output_of(claim)) < 5_000
            assert sum(map(len, it.output_of(claim))) < 1 << 20
            facts_tail = it.processes._table.get(flood).output.tail()  # type: ignore[union-attr]
            assert facts_tail.endswith("end\n")
            assert len(facts_tail) <= 16 << 10


async def test_inherited_output_is_not_captured(tmp_path: Path) -> None:
    """With output = "inherit" the supervisor leaves descriptors 1 and 2 alone."""
    async with world(spec_for(tmp_path, "def handle(message): print('seen')", output="inherit")) as it:
        child = await it.ready()
        claim = it.dispatch(child)
        await it.finished(claim)
        assert it.lines == []
        it.kill(child)
        assert (await it.died(child)).output_tail == ""

"""The log: levels, forms, limits, and what must never be in a line."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from supervisor.core import happenings as h
from supervisor.core.types import ChildId, DeathCause, DeathFacts, ErrorInfo, QueueName
from supervisor.telemetry.catalogue import Level
from supervisor.telemetry.facts import Noted
from supervisor.telemetry.library_log import LibraryHandler
from supervisor.telemetry.lines import json_line
from supervisor.telemetry.log import LogSink, wants_console
from supervisor.telemetry.ratelimit import Rate, RateLimiter
from supervisor.telemetry.writer import LineWriter

ORDERS = QueueName("orders")
FACTS = DeathFacts(
    None, "SIGSEGV", 43_210, 1.5, "Thread 0x1:\n  File x\n  File y", "last words\n\x1b[31mred", oom=False
)
DEATH = h.ChildEnded(ORDERS, ChildId(3), 1, 77, DeathCause.SIGNAL, FACTS, 9, 2, charged=True)


class Lines:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, line: bytes) -> None:
        """Take a line."""
        assert line.endswith(b"\n")
        self.texts.append(line.decode())


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Lines:
    """What was logged."""
    return Lines()


@pytest.fixture
def clock() -> Clock:
    """The log's clock."""
    return Clock()


def sink(lines: Lines, clock: Clock, *, console: bool = False, level: str = "info") -> LogSink:
    """Make a log that writes into a list."""
    return LogSink(lines, console=console, level=level, clock=clock, wall=lambda: 0.0)


class TestJson:
    def test_each_entry_is_one_object_in_one_line(self, lines: Lines, clock: Clock) -> None:
        """Machines split at line ends: nothing inside may be one."""
        sink(lines, clock).happened(DEATH)
        (text,) = lines.texts
        assert text.count("\n") == 1
        record = json.loads(text)
        assert record["event"] == "child.ended"
        assert record["level"] == "warning"
        assert record["time"] == "1970-01-01T00:00:00.000000Z"

    def test_a_death_says_all_that_is_known(self, lines: Lines, clock: Clock) -> None:
        """Cause, signal, peak, message, stack and last output, as fields."""
        sink(lines, clock).happened(DEATH)
        record = json.loads(lines.texts[0])
        assert record["cause"] == "signal"
        assert record["signal"] == "SIGSEGV"
        assert record["peak_rss_kb"] == 43_210
        assert (record["queue"], record["slot"], record["msg_id"], record["attempt"]) == ("orders", 1, 9, 2)
        assert record["stack"] == FACTS.stack
        assert record["output_tail"] == FACTS.output_tail

    def test_surrogates_and_long_texts_do_no_harm(self, lines: Lines, clock: Clock) -> None:
        """Whatever an exception says, the line is valid and bounded."""
        error = ErrorInfo("ValueError", "\udc80" + "x" * 1_000_000, "tb")
        sink(lines, clock).happened(h.MessageRetried(ORDERS, 1, 1, "error", 5, error, 0.1))
        assert len(lines.texts[0]) < 100_000
        assert json.loads(lines.texts[0])["error_type"] == "ValueError"

    def test_no_value_ends_the_line(self) -> None:
        """Separators that only Unicode knows are escaped, and read back as they were."""
        text = "a\x7f\x85b\u2028c\u2029\u202ed\n"
        line = json_line(at=0.0, level=Level.INFO, event="x", text="", fields={"line": text}).decode()
        assert line.splitlines() == [line.rstrip("\n")]
        assert json.loads(line)["line"] == text


class TestConsole:
    def test_values_that_need_it_are_quoted(self, lines: Lines, clock: Clock) -> None:
        """A value with a space, a quote or an equals sign cannot be taken for two."""
        sink(lines, clock, console=True).happened(h.LeaseLost(ORDERS, 5, 'ran "out" a=b'))
        assert 'why="ran \\"out\\" a=b"' in lines.texts[0]
        assert "msg_id=5" in lines.texts[0]

    def test_nothing_steers_the_terminal(self, lines: Lines, clock: Clock) -> None:
        """Escapes, bells and line ends in what a handler says are shown, not obeyed."""
        log = sink(lines, clock, console=True)
        log.output("\x1b]0;title\x07\r\nforged \u202e \x9b31m", queue="orders", slot=0, pid=1, msg_id=2, attempt=1)
        log.happened(DEATH)
        joined = "".join(lines.texts)
        assert not any(char in joined for char in "\x1b\x07\r\x9b\u202e")
        assert lines.texts[0].count("\n") == 1

    def test_stack_and_output_stand_indented_below(self, lines: Lines, clock: Clock) -> None:
        """A stack is readable, and cannot be taken for entries of the log."""
        sink(lines, clock, console=True).happened(DEATH)
        _, *below = lines.texts[0].splitlines()
        assert "    stack:" in below
        assert "    | Thread 0x1:" in below
        assert all(line.startswith("    ") for line in below)

    def test_long_stacks_are_cut(self, lines: Lines, clock: Clock) -> None:
        """Thousands of frames of a recursion do not scroll everything else away."""
        facts = DeathFacts(1, None, 0, 0.0, "frame\n" * 5000, "")
        sink(lines, clock, console=True).happened(
            h.ChildEnded(ORDERS, ChildId(1), 0, 1, DeathCause.EXIT, facts, None, None, charged=False)
        )
        assert len(lines.texts[0].splitlines()) < 50
        assert "lines cut" in lines.texts[0]


class TestLevels:
    def test_what_is_below_the_level_is_not_even_routed(self, lines: Lines, clock: Clock) -> None:
        """The hot happenings cost the log nothing."""
        log = sink(lines, clock)
        assert not log.wants(h.MessageSucceeded)
        assert not log.wants(h.MessageStartedRunning)
        assert log.wants(h.ChildEnded)
        assert sink(lines, clock, level="debug").wants(h.MessageSucceeded)

    def test_an_orderly_end_is_no_warning(self, lines: Lines, clock: Clock) -> None:
        """A child that retires is routine."""
        log = sink(lines, clock)
        log.happened(h.ChildEnded(ORDERS, ChildId(3), 1, 77, DeathCause.RETIRED, FACTS, None, None, charged=False))
        assert lines.texts == []

    def test_a_failed_reload_is_an_error(self, lines: Lines, clock: Clock) -> None:
        """The old code stays, and somebody must know."""
        log = sink(lines, clock, level="error")
        log.happened(h.ReloadEnded(None))
        log.happened(h.ReloadEnded("import failed"))
        assert [json.loads(text)["failed"] for text in lines.texts] == ["import failed"]

    def test_notes_bring_their_own_level_and_name(self, lines: Lines, clock: Clock) -> None:
        """The shell can say what is no happening."""
        log = sink(lines, clock)
        log.happened(Noted("http.listening", "info", "HTTP listens", (("port", 8321),)))
        log.happened(Noted("detail", "debug", "not shown"))
        record = json.loads(lines.texts[0])
        assert (record["event"], record["message"], record["port"]) == ("http.listening", "HTTP listens", 8321)
        assert len(lines.texts) == 1

    def test_children_output_carries_the_message(self, lines: Lines, clock: Clock) -> None:
        """Which message printed this is the first question."""
        sink(lines, clock).output("hello", queue="orders", slot=2, pid=9, msg_id=4, attempt=3)
        record = json.loads(lines.texts[0])
        fields = ("event", "queue", "slot", "pid", "msg_id", "attempt", "line")
        assert [record[name] for name in fields] == ["child.output", "orders", 2, 9, 4, 3, "hello"]

    def test_a_handlers_log_keeps_its_level(self, lines: Lines, clock: Clock) -> None:
        """`message.log.error` is an error here too."""
        log = sink(lines, clock, level="warning")
        log.child_log("error", "bad", queue="orders", slot=0, pid=1, msg_id=1, attempt=1)
        log.child_log("info", "fine", queue="orders", slot=0, pid=1, msg_id=1, attempt=1)
        assert [json.loads(text)["level"] for text in lines.texts] == ["error"]


class TestRate:
    def test_a_storm_is_held_back_and_counted(self, lines: Lines, clock: Clock) -> None:
        """A thousand deaths in a second are a few lines, and the next line says how many were not shown."""
        log = sink(lines, clock)
        for _ in range(1000):
            log.happened(DEATH)
        shown = len(lines.texts)
        assert shown < 100
        clock.now += 1.0
        log.happened(DEATH)
        assert json.loads(lines.texts[-1])["suppressed"] == 1000 - shown

    def test_what_was_held_back_is_said_when_no_line_follows(self, lines: Lines, clock: Clock) -> None:
        """The summary does not wait for another event."""
        log = sink(lines, clock)
        for _ in range(1000):
            log.happened(DEATH)
        shown = len(lines.texts)
        clock.now += 60.0
        log.tick()
        record = json.loads(lines.texts[-1])
        assert (record["event"], record["suppressed_event"], record["count"]) == (
            "log.suppressed", "child.ended", 1000 - shown,
        )  # fmt: skip

    def test_one_queue_cannot_silence_another(self, lines: Lines, clock: Clock) -> None:
        """Limits are kept by queue."""
        log = sink(lines, clock)
        for _ in range(1000):
            log.happened(DEATH)
        before = len(lines.texts)
        log.happened(h.ChildEnded(QueueName("mails"), ChildId(4), 0, 1, DeathCause.EXIT, FACTS, 1, 1, charged=True))
        assert len(lines.texts) == before + 1

    def test_the_number_of_buckets_is_bounded(self) -> None:
        """Keys that somebody else chooses do not grow memory without end."""
        limiter = RateLimiter()
        for number in range(20_000):
            limiter.admit((str(number), ""), Rate(1, 1), 0.0)
        assert len(limiter._buckets) <= 4096


class TestWriter:
    @pytest.fixture
    def pipe(self) -> Iterator[tuple[int, int]]:
        """A pipe."""
        read, write = os.pipe()
        yield read, write
        os.close(write)
        os.close(read)

    def test_lines_arrive_in_order(self, pipe: tuple[int, int]) -> None:
        """One thread, one order."""
        writer = LineWriter(pipe[1], on_dropped=lambda _: None)
        for number in range(100):
            writer.write(b"%d\n" % number)
        writer.close()
        assert os.read(pipe[0], 65_536).split() == [b"%d" % number for number in range(100)]

    def test_a_reader_that_stalls_does_not_block_and_costs_lines(self, pipe: tuple[int, int]) -> None:
        """Nobody reads: writing returns at once, memory is bounded, what is lost is counted."""
        dropped: list[int] = []
        writer = LineWriter(pipe[1], on_dropped=dropped.append, max_bytes=100_000)
        for _ in range(5000):
            writer.write(b"x" * 100 + b"\n")
        assert sum(dropped) > 1000
        drain = threading.Thread(
            target=lambda: [None for _ in iter(lambda: len(os.read(pipe[0], 65_536)) == 65_536, False)]
        )
        drain.start()
        writer.close()
        drain.join(5)

    def test_a_broken_pipe_is_counted_not_raised(self) -> None:
        """The log's reader is gone; the work goes on."""
        read, write = os.pipe()
        os.close(read)
        dropped: list[int] = []
        writer = LineWriter(write, on_dropped=dropped.append)
        writer.write(b"lost\n")
        assert writer.flush()
        writer.close()
        os.close(write)
        assert sum(dropped) == 1

    def test_a_non_blocking_descriptor_loses_nothing(self, pipe: tuple[int, int]) -> None:
        """Somebody who shares the terminal may have changed its mode."""
        os.set_blocking(pipe[1], False)
        writer = LineWriter(pipe[1], on_dropped=lambda _: None)
        writer.write(b"y" * 200_000 + b"\n")
        received = 0
        while received < 200_001:
            received += len(os.read(pipe[0], 65_536))
        writer.close()


class TestLibraries:
    def test_a_librarys_warning_takes_our_form(self, lines: Lines, clock: Clock) -> None:
        """Such as aiohttp and psycopg speak through the standard library."""
        handler = LibraryHandler(sink(lines, clock))
        logger = logging.getLogger("some.library")
        logger.propagate = False
        logger.addHandler(handler)
        try:
            raise ValueError("inner")
        except ValueError:
            logger.exception("went %s", "wrong")
        record = json.loads(lines.texts[0])
        assert (record["event"], record["logger"], record["message"]) == ("library", "some.library", "went wrong")
        assert "inner" in record["traceback"]

    def test_their_chatter_is_not_logged(self, lines: Lines, clock: Clock) -> None:
        """Below warning a library has nothing to say here."""
        handler = LibraryHandler(sink(lines, clock, level="debug"))
        assert handler.level == logging.WARNING


class TestFormat:
    def test_auto_is_json_in_a_pipe(self) -> None:
        """Only a terminal gets lines for people."""
        read, write = os.pipe()
        assert not wants_console("auto", write)
        assert wants_console("console", write)
        assert not wants_console("json", write)
        os.close(read)
        os.close(write)
        assert not wants_console("auto", write)

    def test_auto_is_console_on_a_terminal(self) -> None:
        """A terminal is one."""
        primary, secondary = os.openpty()
        assert wants_console("auto", secondary)
        os.close(primary)
        os.close(secondary)


def test_entries_that_are_seldom_are_not_limited(lines: Lines, clock: Clock) -> None:
    """The banner of a hundred queues is complete."""
    log = sink(lines, clock)
    for number in range(100):
        log.entry("boot.queue", "limits in force", level=Level.INFO, fields={"queue": "one", "number": number})
    assert len(lines.texts) == 100

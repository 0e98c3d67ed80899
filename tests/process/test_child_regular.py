"""A regular child: how handlers end, what they see, what they can do to us."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shared.wire.frames import Kind, ProtocolError
from tests.support.childharness import ChildGone, ChildHarness
from tests.support.waiting import eventually


def test_success_is_one_frame() -> None:
    """A handler that returns gives SUCCESS with the seq of its message."""
    with ChildHarness("plain:succeed") as child:
        assert child.ready is not None
        assert child.ready.meta["rss_kb"] > 1000
        assert [child.run({"n": n})["plain"] for n in range(3)] == [True] * 3


def test_the_message_says_what_it_is() -> None:
    """All documented attributes arrive; our own header does not."""
    headers = b'{"a": 1, "x-supervisor": {"refunds": 3}}'
    with ChildHarness("plain:echo") as child:
        outcome = child.run({"k": [1]}, headers=headers, attempt=4, msg_id=77)
        assert outcome["kind"] == "reject"
        expected = [77, "orders", 4, 4, "2023-11-14T22:13:20+00:00", {"k": [1]}, b'{"k": [1]}', {"a": 1}]
        assert ast.literal_eval(outcome["reason"]) == expected


@pytest.mark.parametrize("headers", [b"[1]", b'"text"', b"null", b"7", b"", b"[" * 16_000 + b"]" * 16_000])
def test_headers_that_are_no_object_are_empty(headers: bytes) -> None:
    """A handler always gets a dict."""
    with ChildHarness("plain:show") as child:
        assert child.run("message.headers", headers=headers)["reason"] == "{}"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("message.retry(after=1.5)", {"kind": "retry", "delay_ms": 1500}),
        ("message.retry(after='2m')", {"kind": "retry", "delay_ms": 120_000}),
        ("message.retry()", {"kind": "retry"}),
        ("message.dead_letter('no\\x00 good')", {"kind": "reject", "reason": "no good"}),
        ("message.abandon()", {"kind": "abandon"}),
        ("message.archive()", {"kind": "success", "ack": "archive"}),
        ("message.delete()", {"kind": "success", "ack": "delete"}),
        ("object()", {"kind": "success", "plain": True}),
        ("False", {"kind": "success", "plain": True}),
        ("ValueError('returned, not raised')", {"kind": "success", "plain": True}),
    ],
)
def test_what_a_returned_value_means(expression: str, expected: dict[str, Any]) -> None:
    """Verdicts count, any other value is a success."""
    with ChildHarness("plain:evaluate") as child:
        assert child.run(expression) == expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("raise message.retry(after=3)", {"kind": "retry", "delay_ms": 3000}),
        ("raise message.dead_letter('x')", {"kind": "reject", "reason": "x"}),
        ("raise message.abandon()", {"kind": "abandon"}),
        ("raise ExceptionGroup('one', [message.retry(after=1)])", {"kind": "retry", "delay_ms": 1000}),
    ],
)
def test_a_raised_verdict_counts(statement: str, expected: dict[str, Any]) -> None:
    """Raising a verdict is the same as returning it."""
    with ChildHarness("plain:execute") as child:
        assert child.run(statement) == expected


@pytest.mark.parametrize("delay", ["-1", "float('nan')", "float('inf')", "10**30", "'soon'", "True", "'-3s'"])
def test_an_impossible_delay_is_a_permanent_failure(delay: str) -> None:
    """Refused before any SQL."""
    with ChildHarness("plain:evaluate") as child:
        outcome = child.run(f"message.retry(after={delay})")
        assert (outcome["kind"], outcome["permanent"]) == ("error", True)
        assert outcome["error"]["type"].endswith("ImpossibleDelay")


@pytest.mark.parametrize(
    ("how", "kind_of_error"),
    [
        ("value", "ValueError"),
        ("exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("cancelled", "asyncio.exceptions.CancelledError"),
        ("timeout", "TimeoutError"),
        ("pipe", "BrokenPipeError"),
        ("eof", "EOFError"),
        ("generator exit", "GeneratorExit"),
        ("base", "BaseException"),
        ("stopped", "child.verdicts.Stopped"),
        ("nasty", "hostile.Nasty"),
        ("ring", "ValueError"),
        ("group", "ExceptionGroup"),
        ("recursion", "RecursionError"),
        ("memory", "MemoryError"),
        ("long", "ValueError"),
        ("escapes", "ValueError"),
    ],
)
def test_every_exception_is_an_ordinary_failure(how: str, kind_of_error: str) -> None:
    """Whatever is raised, the child says so and takes the next message."""
    with ChildHarness("hostile:fail") as child:
        outcome = child.run(how)
        assert outcome["kind"] == "error"
        assert "permanent" not in outcome
        assert outcome["error"]["type"] == kind_of_error
        for text in outcome["error"].values():
            assert "\x00" not in text
            assert len(text.encode("utf-8")) <= 65_536
        assert child.run("nothing") == {"kind": "success", "plain": True}


def test_a_true_attribute_permanent_is_told() -> None:
    """`permanent` makes it final."""
    with ChildHarness("hostile:fail") as child:
        outcome = child.run("permanent")
        assert outcome["permanent"] is True
        assert outcome["error"]["message"] == "for good"


def test_the_traceback_is_the_handlers_own() -> None:
    """It begins in the handler, not in our frames."""
    with ChildHarness("hostile:fail") as child:
        traceback = child.run("value")["error"]["traceback"]
        assert "hostile.py" in traceback
        assert "caller.py" not in traceback


def test_a_swallowed_verdict_says_nothing() -> None:
    """An `except Exception` around a raised verdict: as if it had not been raised."""
    with ChildHarness("hostile:fail") as child:
        assert child.run("swallowed verdict") == {"kind": "success", "plain": True}


@pytest.mark.parametrize("raw", [None, b"{", b"\xff\xfe", b"[" * 16_000 + b"]" * 16_000])
def test_a_body_that_cannot_be_decoded_is_invalid(raw: bytes | None) -> None:
    """SQL NULL, broken JSON, not UTF-8, nested too deeply."""
    with ChildHarness("plain:echo") as child:
        assert child.run(raw=raw)["kind"] == "invalid_message"


def test_raw_still_works_where_the_body_does_not() -> None:
    """Only reading `.body` fails."""
    with ChildHarness("plain:succeed") as child:
        assert child.run(raw=None)["kind"] == "success"
        assert child.run(raw=b"[" * 16_000 + b"]" * 16_000)["kind"] == "success"


def test_numbers_are_not_lied_about() -> None:
    """1e400 is no infinity, and 5 000 digits are read."""
    with ChildHarness("plain:echo") as child:
        assert "Decimal('1E+400')" in child.run(raw=b"1e400")["reason"]
        assert "[9223372036854775807, 2.5]" in child.run(raw=b"[9223372036854775807, 2.5]")["reason"]
        assert child.run(raw=b"1" * 4000)["kind"] == "reject"
    with ChildHarness("plain:sleep") as child:
        assert "TypeError" not in str(child.run(raw=b"0." + b"0" * 5000))


def test_a_large_body_arrives() -> None:
    """50 MB come through the pipe whole."""
    with ChildHarness("plain:show") as child:
        body = b'"' + b"x" * 50_000_000 + b'"'
        # The expression is no Python, so that its error shows how much of it arrived.
        outcome = child.run(raw=body)
        assert outcome["error"]["type"] == "NameError"


def test_time_left_counts_down_or_is_none() -> None:
    """Seconds to hard_timeout, None without one, never negative."""
    with ChildHarness("plain:show") as child:
        assert child.run("message.time_left()")["reason"] == "None"
        assert 9 < float(child.run("message.time_left()", limit_ms=10_000)["reason"]) <= 10
        assert float(child.run("message.time_left()", limit_ms=0)["reason"]) == 0


# --- stop, progress, log ----------------------------------------------------------------------------------------------


def test_a_stop_is_seen_and_told() -> None:
    """raise_if_stopped raises Stopped, and its outcome is `stopped`."""
    with ChildHarness("plain:wait_for_stop") as child:
        seq = child.start()
        child.send(Kind.STOP, seq, {"reason": "shutdown"})
        outcome = child.outcome(seq)
        assert outcome["kind"] == "stopped"
        assert outcome["error"]["message"] == "shutdown"


def test_a_stop_for_another_message_is_ignored() -> None:
    """A stop that comes too late does not hit the next message."""
    with ChildHarness("plain:show") as child:
        child.run("1")
        child.send(Kind.STOP, 1, {"reason": "cancelled"})
        assert child.run("message.stop_requested")["reason"] == "False"


@pytest.mark.parametrize("late", [False, True], ids=["its-own", "of-the-message-before"])
def test_a_stop_that_is_read_together_with_its_message_counts(late: bool) -> None:
    """The child was slow: dispatch and stop lay there side by side."""
    with ChildHarness("plain:show") as child:
        child.run("1")
        os.kill(child.pid, signal.SIGSTOP)
        seq = child.dispatch("message.stop_requested")
        child.send(Kind.STOP, seq - 1 if late else seq, {"reason": "shutdown"})
        os.kill(child.pid, signal.SIGCONT)
        assert child.outcome(seq)["reason"] == str(not late)


def test_a_thread_sees_the_stop() -> None:
    """Any thread may ask."""
    with ChildHarness("plain:wait_for_stop_in_thread") as child:
        seq = child.start()
        child.send(Kind.STOP, seq, {"reason": "soft_timeout"})
        assert child.outcome(seq)["reason"] == "[True]"


def test_progress_is_bounded() -> None:
    """A thousand reports in a row become a few frames."""
    with ChildHarness("plain:execute") as child:
        child.run("for n in range(1000): message.progress(f'{n} of 1000')")
        texts = [frame.meta["text"] for frame in child.asides if frame.kind is Kind.PROGRESS]
        assert 1 <= len(texts) <= 20
        assert texts[0] == "0 of 1000"


def test_log_travels_as_frames() -> None:
    """Records keep level and exception, and are bounded."""
    code = """
try:
    1 / 0
except ZeroDivisionError:
    message.log.exception("it %s", "broke")
message.log.debug("x" * 100_000)
message.log.info("bad %d arguments", "text")
"""
    with ChildHarness("plain:execute") as child:
        seq = child.start(code)
        child.outcome(seq)
        first, second = child.asides[:2]
        assert first.kind is Kind.LOG
        assert first.meta["level"] == "error"
        assert first.meta["text"].startswith("it broke\nTraceback")
        assert (second.meta["level"], len(second.meta["text"])) == ("debug", 8192)
        child.asides.clear()
        child.run("for n in range(5000): message.log.info(n)")
        assert len(child.asides) < 400


# --- async ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", ["async_succeed", "returns_coroutine", "instance"])
def test_async_handlers_and_callables_run(handler: str) -> None:
    """Coroutine functions, functions that return one, and objects with __call__."""
    with ChildHarness(f"plain:{handler}") as child:
        assert [child.run()["kind"] for _ in range(3)] == ["success"] * 3


def test_async_outcomes() -> None:
    """Exits, interrupts, cancellation and groups do not tear the loop apart."""
    with ChildHarness("plain:async_raise") as child:
        kinds = {}
        for how in ("exit", "interrupt", "cancelled", "timeout", "stop loop"):
            outcome = child.run(how)
            assert outcome["kind"] == "error"
            kinds[how] = outcome["error"]["type"]
        assert kinds == {
            "exit": "SystemExit",
            "interrupt": "KeyboardInterrupt",
            "cancelled": "asyncio.exceptions.CancelledError",
            "timeout": "TimeoutError",
            "stop loop": "RuntimeError",
        }
        assert child.run("retry") == {"kind": "retry", "delay_ms": 2000}
        assert child.run("group") == {"kind": "reject", "reason": "from a task"}
        assert child.run("loop") == child.run("loop")


# --- hostile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("handler", "kind"), [("fork_and_return", "success"), ("fork_and_raise", "error")])
def test_a_forked_copy_never_answers(handler: str, kind: str) -> None:
    """Only the process that got the message tells how it ended."""
    with ChildHarness(f"hostile:{handler}") as child:
        for _ in range(3):
            outcome = child.run()
            assert outcome["kind"] == kind
            if kind == "error":
                assert outcome["error"]["message"] == "original"


def test_closed_streams_do_no_harm() -> None:
    """The next handler's print works again."""
    code = "import sys; sys.stdout.close(); sys.stderr.close()"
    with ChildHarness("plain:execute") as child:
        assert child.run(code)["kind"] == "success"
        assert child.run("print('still here')")["kind"] == "success"
        assert child.run("import sys; sys.stdout = 7")["kind"] == "success"
        assert child.run("print('again')")["kind"] == "success"
        assert child.output() == "still here\nagain\n"


def test_output_of_c_code_is_not_lost() -> None:
    """Text without a newline, printed by C, is in the pipe before a kill."""
    with ChildHarness("hostile:print_in_c") as child:
        child.start(20)
        eventually(lambda: "from C" in child.output(), what="the text")
        child.process.kill()


def test_closed_descriptors_end_the_child_with_79() -> None:
    """It knows that its pipes are gone; what the handler opened instead gets none of our frames."""
    with ChildHarness("hostile:close_descriptors") as child:
        child.start()
        with pytest.raises(ChildGone):
            child.receive()
        assert child.wait() == 79


def test_garbage_on_every_descriptor_stays_a_protocol_error() -> None:
    """The parent cannot take it for a frame."""
    with ChildHarness("hostile:write_garbage") as child:
        child.dispatch()
        with pytest.raises(ProtocolError, match="not a frame"):
            child.receive()


def test_stdin_is_empty() -> None:
    """Reading it ends at once."""
    with ChildHarness("hostile:read_everything") as child:
        assert child.run()["kind"] == "success"


# --- signals and stacks -----------------------------------------------------------------------------------------------


def test_group_signals_disturb_nothing() -> None:
    """TERM, INT and HUP while a handler sleeps and while idle."""
    with ChildHarness("plain:sleep") as child:
        seq = child.start(0.2)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.killpg(child.pid, number)
        assert child.outcome(seq)["kind"] == "success"
        os.killpg(child.pid, signal.SIGTERM)
        assert child.run(0)["kind"] == "success"


def test_a_handlers_own_signal_functions_do_not_outlive_it() -> None:
    """TERM between messages is ours again; an alarm that goes off there ends nothing."""
    with ChildHarness("hostile:own_signals") as child:
        child.run(0)
        os.kill(child.pid, signal.SIGTERM)
        child.run(0.01)
        eventually(lambda: child.command_line().endswith("idle"), what="an idle child")
        with on_one_processor(child.pid):  # where it cannot run before both the alarm and the message are there
            os.kill(child.pid, signal.SIGALRM)
            seq = child.dispatch(0)
        assert child.outcome(seq)["kind"] == "success"


@contextlib.contextmanager
def on_one_processor(pid: int) -> Iterator[None]:
    """Tie a child to the processor of this thread, from which it does not push it (ADR 0021)."""
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(pid, one)
    os.sched_setaffinity(0, one)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        os.sched_setaffinity(pid, before)


@pytest.mark.parametrize("handler", ["hold_the_interpreter", "block_signals"])
def test_the_stack_is_readable_whatever_the_handler_does(handler: str) -> None:
    """Also inside C code that holds the interpreter, and with every signal blocked in the main thread."""
    with ChildHarness(f"hostile:{handler}") as child:
        child.start()
        time.sleep(0.05)  # the handler is the thing under test: it has to be in its call
        os.kill(child.pid, signal.SIGUSR2)
        eventually(lambda: f"in {handler}" in child.stack(), what="the stack")


def test_a_crash_leaves_its_stack() -> None:
    """SIGSEGV with the handler's line in the memfd."""
    with ChildHarness("hostile:crash") as child:
        child.start()
        assert child.wait() == -signal.SIGSEGV
        assert "Segmentation fault" in child.stack()
        assert "in crash" in child.stack()


def test_titles_tell_what_runs() -> None:
    """Idle, the message, idle."""
    with ChildHarness("plain:wait_for_stop") as child:
        assert child.command_line() == "pgmq-child orders[1] idle"
        seq = child.start(attempt=3, msg_id=42)
        assert child.command_line() == "pgmq-child orders[1] #42 attempt 3"
        child.send(Kind.STOP, seq, {"reason": "shutdown"})
        child.outcome(seq)
        eventually(lambda: child.command_line().endswith("idle"))


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit frame", "end of stream"])
def test_an_idle_child_ends_in_order(how: str) -> None:
    """EXIT and a closed pipe mean the same: exit handlers run, code 0."""
    with ChildHarness("plain:execute") as child:
        child.run("import atexit; atexit.register(print, 'exit handler ran')")
        if how == "exit frame":
            child.send(Kind.EXIT)
        else:
            child.hang_up()
        assert child.wait() == 0
        assert "exit handler ran" in child.output()


def test_endless_threads_and_exit_handlers_are_bounded() -> None:
    """A non-daemon thread that never ends holds the process for three seconds."""
    with ChildHarness("hostile:leave_threads") as child:
        child.run()
        before = time.monotonic()
        child.send(Kind.EXIT)
        assert child.wait(10) == 0
        assert time.monotonic() - before < 5


def test_a_child_of_a_dead_parent_does_not_start() -> None:
    """The parent is asked for after PDEATHSIG was set."""
    with ChildHarness("plain:succeed", claimed_parent=1, wait_ready=False) as child:
        assert child.wait() == 79


def test_rubbish_from_the_parent_ends_the_child() -> None:
    """A stream that is no frames cannot be mended."""
    with ChildHarness("plain:succeed") as child:
        child.send_raw(b"x" * 64)
        assert child.wait() == 79

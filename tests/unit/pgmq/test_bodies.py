"""Bodies and headers as JSON text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ProtocolError, ValidationError
from shared.pgmq import bodies
from shared.pgmq.bodies import RawJson, decode, encode_body, encode_headers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet=st.characters(exclude_categories=("Cs",))), inner),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_values_survive_the_way_through_text(value: Any) -> None:
    """What json.dumps takes comes back equal."""
    assert decode(encode_body(value), "body") == value


@pytest.mark.parametrize("raw", ['{"n": 1.50}', "[" * 5000 + "]" * 5000, "1" * 5000])
def test_raw_json_is_not_touched(raw: str) -> None:
    """Text and bytes pass as they are, also where Python could not read them."""
    assert encode_body(RawJson(raw)) == raw
    assert encode_body(RawJson(raw.encode())) == raw


def test_none_is_json_null_as_body_and_sql_null_as_headers() -> None:
    """A body is always JSON; headers may be missing."""
    assert encode_body(None) == "null"
    assert encode_headers(None) is None
    assert decode(None, "body") is None


def cycle() -> list[Any]:
    """Make a list that contains itself."""
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, {1, 2}, b"bytes", object(), {"a": "\ud800"}, {(1, 2): 3}, cycle(), RawJson(b"\xff"),
     RawJson("\udfff"), {"a": [{1}]}],
)  # fmt: skip
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    """With our error, before anything is sent."""
    with pytest.raises(ValidationError):
        encode_body(value)


@pytest.mark.parametrize("headers", [[1], "text", 5, ("a", 1)])
def test_headers_are_a_mapping(headers: Any) -> None:
    """Anything else is refused; raw JSON is the sender's business."""
    with pytest.raises(ValidationError, match="headers"):
        encode_headers(headers)
    assert encode_headers(RawJson("[1]")) == "[1]"


def test_a_body_beyond_what_jsonb_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes, not in characters."""
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 10)
    assert encode_body("ü" * 4) == '"üüüü"'
    with pytest.raises(ValidationError, match="12 bytes"):
        encode_body("ü" * 5)


@pytest.mark.parametrize("text", ["{broken", "[" * 100_000, "1" * 5000])
def test_what_python_cannot_read_is_a_protocol_error(text: str) -> None:
    """The remedy is the raw text."""
    with pytest.raises(ProtocolError) as caught:
        decode(text, "body")
    assert caught.value.remedy

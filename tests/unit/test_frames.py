"""Frames: what is packed comes out again however it is cut, and rubbish is refused, never misread."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.wire.frames import (
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    Decoder,
    Dispatched,
    Frame,
    Kind,
    ProtocolError,
    decode_dispatch,
    encode,
    encode_dispatch,
    rest_of_dispatch,
    whole_dispatch,
)

U32 = st.integers(0, 2**32 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
MESSAGES = st.tuples(
    st.integers(0, 2**64 - 1),
    I64,
    U32,
    I32,
    I64,
    I64,
    st.binary(max_size=60),
    st.none() | st.binary(max_size=200),
)
META = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20), max_size=4)
OTHER_FRAMES = st.tuples(st.sampled_from(Kind), st.integers(0, 2**64 - 1), META, st.binary(max_size=50))


@given(MESSAGES)
def test_a_dispatch_says_the_same_both_ways(message: Dispatched) -> None:
    """Taken apart at once, or through the decoder; SQL NULL and an empty body are two things."""
    data = encode_dispatch(message)
    assert whole_dispatch(data) == message
    (frame,) = Decoder().feed(data)
    assert decode_dispatch(frame) == message


@given(MESSAGES, st.data())
def test_a_part_of_a_dispatch_is_none(message: Dispatched, data: st.DataObject) -> None:
    """And how much is missing can be said from the header on; with more behind it, it is the decoder's."""
    packed = encode_dispatch(message)
    cut = data.draw(st.integers(0, len(packed) - 1))
    assert whole_dispatch(packed[:cut]) is None
    assert rest_of_dispatch(packed[:cut]) == (len(packed) - cut if cut >= HEADER.size else 0)
    assert rest_of_dispatch(packed) == 0
    assert whole_dispatch(packed + b"\0") is None
    assert rest_of_dispatch(packed + b"\0") == 0


@given(st.lists(OTHER_FRAMES, max_size=5), st.lists(st.integers(0, 400), max_size=6))
def test_frames_come_out_whole_however_they_are_cut(
    said: list[tuple[Kind, int, dict[str, object], bytes]], cuts: list[int]
) -> None:
    """In order, none twice, none missing."""
    data = b"".join(itertools.starmap(encode, said))
    decoder = Decoder()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    frames = [frame for start, end in itertools.pairwise([0, *ends]) for frame in decoder.feed(data[start:end])]
    assert frames == [Frame(kind, seq, meta, body, 0) for kind, seq, meta, body in said]
    assert decoder.pending_bytes == 0


@given(st.binary(max_size=120) | st.binary(max_size=120).map(lambda rest: bytes((MAGIC, Kind.DISPATCH)) + rest))
def test_rubbish_is_refused_or_waited_for(data: bytes) -> None:
    """Nothing but `ProtocolError` is raised, by any of the readers."""
    for read in (Decoder().feed, whole_dispatch, rest_of_dispatch):
        with contextlib.suppress(ProtocolError):
            read(data)


@pytest.mark.parametrize("kept", [0, 35, 36, 37])
def test_a_dispatch_that_lies_about_its_lengths_is_refused(kept: int) -> None:
    """Headers that would reach beyond the frame, and a frame without room for its own fields."""
    body = encode_dispatch((1, 1, 1, 1, 1, -1, b"abcdef", b""))[HEADER.size :][:kept]
    (frame,) = Decoder().feed(encode(Kind.DISPATCH, 1, body=body))
    with pytest.raises(ProtocolError, match="too short"):
        decode_dispatch(frame)
    packed = encode(Kind.DISPATCH, 1, body=body)
    if kept >= 36:
        with pytest.raises(ProtocolError, match="too short"):
            whole_dispatch(packed)
    else:
        assert whole_dispatch(packed) is None


def test_what_is_over_the_limit_is_not_packed() -> None:
    """The limit is of the whole: fields, headers and body."""
    with pytest.raises(ProtocolError, match="over the limit"):
        encode_dispatch((1, 7, 1, 1, 1, -1, b"", bytes(MAX_BODY_BYTES)))

"""What the server and a member's process say to each other: frames, and the memory that they share."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.comm.sync import CACHE_LINE
from apportion.serving.pool.frames import INLINE_BYTES, ROOM, Arena, Kind, Placed, Reader, decode, encode, placed
from apportion.serving.protocol.datatypes import objects

NOTHING = memoryview(b"")
FRAMES = [
    encode(Kind.RUN, 7, 12.5, [Placed("FP32", np.ones((2, 3), np.float32)), Placed("INT8", np.array([5], np.int8))]),
    encode(Kind.CONTROL, 0, math.inf, text=b'{"what": "prepared"}'),
    encode(Kind.DONE, 8, 1.0, [Placed("BYTES", objects([b"a", b"", b"ccc"])), Placed("FP64", np.array(2.5))]),
    encode(Kind.EXPIRED, 9, 1.0),
]


def test_a_frame_comes_through_as_it_is() -> None:
    run = decode(memoryview(FRAMES[0]), NOTHING)
    assert (run.kind, run.number, run.deadline) == (Kind.RUN, 7, 12.5)
    assert [t.array.tolist() for t in run.tensors] == [[[1.0] * 3] * 2, [5]]
    assert decode(memoryview(FRAMES[1]), NOTHING).text == b'{"what": "prepared"}'
    texts, number = decode(memoryview(FRAMES[2]), NOTHING).tensors
    assert texts.array.tolist() == [b"a", b"", b"ccc"]
    assert number.array.shape == ()


def test_tensors_in_a_frame_begin_where_they_can_be_computed_with() -> None:
    tensors = [Placed("INT8", np.array([1], np.int8)), Placed("FP64", np.array([2.0]))]
    for tensor in decode(memoryview(encode(Kind.RUN, 1, 1.0, tensors)), NOTHING).tensors:
        assert tensor.array.flags.aligned


@given(st.lists(st.integers(1, 40)))
def test_frames_come_whole_out_of_any_pieces(cuts: list[int]) -> None:
    large = encode(Kind.CONTROL, 0, math.inf, text=b"x" * 3 * ROOM)
    sent = [*FRAMES, large, FRAMES[0], large]
    stream, reader, found = b"".join(sent), Reader(), []
    for cut in [*cuts, 5, ROOM, 7, len(stream)]:
        piece, stream = stream[:cut], stream[cut:]
        while piece:
            room = reader.room
            took = min(len(room), len(piece))
            room[:took] = piece[:took]
            found += [bytes(frame) for frame in reader.advance(took)]
            piece = piece[took:]
    assert found == sent


def test_what_lies_in_shared_memory_is_not_sent() -> None:
    shared = bytearray(1 << 16)
    there = np.frombuffer(shared, np.float32, 8192, 128)
    frame = encode(Kind.RUN, 1, 1.0, [Placed("FP32", there, 128)])
    assert len(frame) < 100
    there[:] = 3.0
    (tensor,) = decode(memoryview(frame), memoryview(shared)).tensors
    assert tensor.array.tolist() == [3.0] * 8192
    assert tensor.offset == 128


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4000)), max_size=60))
def test_ranges_never_overlap_and_all_of_them_come_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(16384)
    taken: list[tuple[int, int]] = []
    for give, size in steps:
        if give and taken:
            arena.give_back(taken.pop(size % len(taken)))
            continue
        found = arena.take(size)
        if found is None:
            continue
        offset, got = found
        assert got >= size
        assert offset % CACHE_LINE == 0
        assert offset + got <= 16384
        assert all(offset + got <= o or o + n <= offset for o, n in taken)
        taken.append(found)
    assert arena.free == 16384 - sum(n for _, n in taken)
    for each in taken:
        arena.give_back(each)
    assert arena.take(16384) == (0, 16384), "what comes back is joined"
    arena.close()


def test_a_range_that_is_given_back_twice_is_a_defect() -> None:
    arena = Arena(4096)
    taken = arena.take(100)
    assert taken is not None
    arena.give_back(taken)
    with pytest.raises(AssertionError, match="twice"):
        arena.give_back(taken)
    arena.close()


def test_large_tensors_lie_in_the_inbox_as_long_as_somebody_holds_them() -> None:
    inbox = Arena(1 << 20)
    small, large = np.zeros(4, np.float32), np.arange(INLINE_BYTES, dtype=np.float32)
    tensors, held = placed([("FP32", small), ("FP32", large)], inbox)
    assert [tensor.offset for tensor in tensors] == [None, 0]
    assert len(held) == 1
    np.testing.assert_array_equal(np.frombuffer(inbox.memory, np.float32, large.size), large)
    again, still = placed([("FP32", tensors[1].array)], inbox, held)
    assert (again[0].offset, still) == (0, held), "what lies there is not copied"
    del tensors, again, still
    assert inbox.free < 1 << 20
    del held
    assert inbox.free == 1 << 20
    full, held = placed([("FP32", np.zeros(1 << 19, np.float32))], inbox)
    assert (full[0].offset, held) == (None, []), "it is sent instead"
    inbox.close()


def test_what_others_read_as_well_cannot_be_changed() -> None:
    inbox = Arena(4096)
    theirs = Arena(4096, inbox.descriptor, readonly=True)
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(theirs.memory, np.uint8)[:] = 1
    theirs.close()

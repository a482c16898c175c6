"""Words of shared memory: what a commit word says of the data beside it."""

from __future__ import annotations

import ctypes
import itertools
import time

import pytest
from ranks import on_ranks

from apportion.comm.sync import CommitWord
from apportion.comm.world import World

WHOLE, SECONDS = 100, 30.0


def test_a_word_is_published_read_and_withdrawn() -> None:
    number = ctypes.c_int64()
    word = CommitWord(number)
    assert word.read() == 0
    word.publish(7)
    assert (word.read(), number.value) == (7, 7)
    assert word.is_still(7)
    word.withdraw()
    assert not word.is_still(7)
    assert word.read() == 0


def writes_and_reads(world: World) -> int:
    """Rank 0 writes numbers and then the word, again and again; rank 1 looks at the numbers of each word it reads,
    until it has found them whole often enough. Returns how often the numbers were others than the word said."""
    memory = world.shared(world.another("words"), 8 * 66)
    numbers = (ctypes.c_int64 * 66).from_buffer(memory)
    word, wrong, whole, end = CommitWord(ctypes.c_int64.from_buffer(memory)), 0, 0, time.monotonic() + SECONDS
    for n in itertools.count(1):
        if numbers[65] == WHOLE or time.monotonic() > end:
            break
        if world.rank == 0:
            word.withdraw()
            numbers[1] = numbers[32] = numbers[64] = n
            word.publish(n)
            continue
        told = word.read()
        found = (numbers[1], numbers[32], numbers[64])
        if told and word.is_still(told):
            whole, wrong = whole + 1, wrong + (found != (told,) * 3)
            numbers[65] = whole
    assert numbers[65] == WHOLE, f"only {numbers[65]} in {SECONDS} s"
    return wrong


@pytest.mark.processes
def test_whoever_reads_the_word_finds_what_was_written_before_it() -> None:
    assert on_ranks(writes_and_reads, 2) == [0, 0]

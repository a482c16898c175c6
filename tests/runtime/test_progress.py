"""How far a rank is, in memory that its supervisor reads."""

from __future__ import annotations

import pytest

from apportion.runtime.worker.progress import NBYTES, WORDS, Progress, lines

NAMES = ("beats", "waiting", "step", "begun", "saved_at", "started")


def test_every_word_has_a_place_of_its_own_within_the_line() -> None:
    places = {getattr(Progress, name).index for name in NAMES}
    assert len(places) == len(NAMES)
    assert places <= set(range(WORDS))


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_what_a_rank_writes_is_in_its_own_line_alone(slot: int) -> None:
    memory = bytearray(3 * NBYTES)
    line = Progress.of_slot(memory, slot)
    line.step, line.saved_at = 7, 1 << 60
    line.beats += 1
    line.waiting_word[0] = 1
    seen = lines(memory)
    assert [int(seen[slot, getattr(Progress, name).index]) for name in NAMES] == [1, 1, 7, 0, 1 << 60, 0]
    assert not seen[[other for other in range(3) if other != slot]].any()


def test_who_takes_a_slot_finds_what_was_left_in_it() -> None:
    memory = bytearray(2 * NBYTES)
    Progress.of_slot(memory, 1).saved_at = 5
    assert Progress.of_slot(memory, 1).saved_at == 5
    assert Progress().saved_at == 0

"""What launchers say to ranks about their places, and what follows from it: pure."""

from __future__ import annotations

import pytest

from apportion.comm.network.launched_ranks import Slot, count_ranks, given, hosts, refuse_contradictions


def slots(names: str, local_ranks: str, *sizes: int) -> list[Slot]:
    return [(n, int(at), sizes[i % len(sizes)]) for i, (n, at) in enumerate(zip(names, local_ranks, strict=True))]


def test_the_hosts_of_ranks_are_told_by_name_and_local_rank() -> None:
    assert hosts(slots("aabb", "0101", 2)) == [0, 0, 1, 1]
    assert hosts(slots("abab", "0011", 2)) == [0, 1, 0, 1], "dealt out in turn"
    assert hosts(slots("aaaa", "0101", 2)) == [0, 0, 1, 1], "two starts on one host"
    assert hosts(slots("aaaa", "0011", 2)) == [0, 1, 0, 1]
    assert hosts(slots("aaa", "000", 1)) == [0, 1, 2]


def test_the_ranks_of_a_host_are_counted_where_nobody_says_how_many_there_are() -> None:
    assert [count_ranks([("a", 0), ("b", 0), ("a", 1)], rank) for rank in range(3)] == [2, 1, 2]
    with pytest.raises(ValueError, match=r"the 2 ranks on host a were given LOCAL_RANK=\[1, 1\]: they must be 0 to 1"):
        count_ranks([("a/boot", 1), ("b", 0), ("a/boot", 1)], 1)


@pytest.mark.parametrize("right", [slots("aabb", "0101", 2), slots("aab", "010", 2, 2, 1), slots("aaaa", "0101", 2)])
def test_numbers_that_can_be_are_taken(right: list[Slot]) -> None:
    refuse_contradictions(right)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (slots("ab", "00", 2), r"rank 0 on host a was given LOCAL_RANK=0 and LOCAL_WORLD_SIZE=2, and the ranks there"),
        (slots("aabb", "0111", 2), r"rank 2 on host b was given LOCAL_RANK=1 .* with LOCAL_RANK=\[1\]"),
        (slots("aab", "011", 2, 2, 1), r"rank 2 on host b was given LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1"),
        (slots("aa", "01", 2, 1), r"LOCAL_WORLD_SIZE"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_by_name(wrong: list[Slot], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refuse_contradictions(wrong)


def test_slurm_is_believed_where_each_host_has_as_many_ranks() -> None:
    environment = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    found = given({**environment, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    assert found == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert "LOCAL_WORLD_SIZE" not in given({**environment, "SLURM_STEP_TASKS_PER_NODE": "3,1"}), "it is found out"

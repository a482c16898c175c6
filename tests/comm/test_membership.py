"""The page of the membership of one host, alone and among several hosts."""

from __future__ import annotations

import pytest

from apportion.comm.membership import HostShare, MemberPlace, Membership
from apportion.comm.world import World
from apportion.errors import MembershipChanged, PeerLost


def page(slots: int) -> Membership:
    return Membership(memoryview(bytearray(Membership.nbytes(slots))), slots)


def test_on_one_host_ranks_are_slots_and_meet_nowhere() -> None:
    members = page(3)
    members.begin()
    assert [members.place(slot) for slot in range(3)] == [
        MemberPlace(slot, 3, 0, local_rank=slot, local_size=3, meeting=None) for slot in range(3)
    ]
    assert members.slots_by_rank() == [0, 1, 2]


@pytest.mark.parametrize("address", ["10.0.0.1", "2001:0db8:85a3:0000:0000:8a2e:0370:7334"])
def test_a_host_among_several_has_some_of_the_ranks_and_says_where_all_meet(address: str) -> None:
    members = page(2)
    members.begin(HostShare(first=3, size=5, address=address, port=5000))
    assert [members.place(slot) for slot in range(2)] == [
        MemberPlace(3, 5, 0, local_rank=0, local_size=2, meeting=(address, 5000)),
        MemberPlace(4, 5, 0, local_rank=1, local_size=2, meeting=(address, 5000)),
    ]
    assert members.slots_by_rank() == [0, 1]


def test_the_training_is_under_way_from_the_generation_after_it_began() -> None:
    members = page(1)
    share = HostShare(first=0, size=1, address="10.0.0.1", port=5000)
    members.begin(share)
    told = []
    for generation, began, saved in ((2, 0, False), (4, 4, True), (6, 4, True)):
        members.open_change(generation - 1)
        members.close_change([0], share=share, began=began, saved=saved)
        place = members.place(0)
        told.append((World(place=place).under_way, place.saved))
    assert told == [(True, False), (False, True), (True, True)]
    assert not World().under_way


def test_a_change_moves_ranks_to_other_slots_and_the_meeting_to_another_place() -> None:
    members = page(3)
    members.begin(HostShare(2, 5, "10.0.0.1", 5000))
    assert members.open_change(7) == 7
    with pytest.raises(MembershipChanged):
        members.check(0)
    members.close_change([2, 1], share=HostShare(0, 2, "10.0.0.22", 6000))
    assert members.generation == 8
    assert members.slots_by_rank() == [2, 1]
    assert members.place(2) == MemberPlace(0, 2, 8, local_rank=0, local_size=2, meeting=("10.0.0.22", 6000))
    with pytest.raises(PeerLost, match="goes on without the worker on slot 0"):
        members.rejoin(0, 0.1)


def test_whoever_waits_for_a_change_is_told_whether_it_has_begun() -> None:
    members = page(1)
    members.begin()
    assert not members.await_change(0, 0.01)
    members.open_change()
    assert members.await_change(0, 10.0)

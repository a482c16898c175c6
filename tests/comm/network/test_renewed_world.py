"""A world of the same ranks beside the one that is there: what ends in it ends there alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ranks import apart, on_ranks

from apportion.comm.world import World
from apportion.errors import PeerLost

pytestmark = pytest.mark.processes


def total(world: World) -> float:
    """The sum of all ranks' numbers."""
    number = torch.tensor([float(world.rank + 1)])
    world.group().all_reduce(number).wait()
    return number.item()


def abandoned(world: World) -> Any:
    """What a rank meets that waits, in the group and in those made of it, for ranks that never come."""
    own = apart()
    fresh = own.renew()
    told: list[Any] = [total(fresh)]
    lane = fresh.group().lane()
    if own.rank == 0:
        thread = threading.Thread(target=fresh.abandon)
        thread.start()
        for group in (lane, fresh.group(), fresh.group().lane()):
            try:
                group.barrier()
            except PeerLost as error:
                told.append(str(error))
        thread.join()
        try:
            fresh.check()  # which stores ask while they wait in memory
        except PeerLost as error:
            told.append(str(error))
    told.append(total(own))
    fresh.close()
    again = own.renew()
    told.append(total(again))
    again.close()
    own.close()
    return told


def test_who_waits_in_an_abandoned_world_is_let_go_and_the_world_it_came_from_goes_on() -> None:
    first, *others = on_ranks(abandoned, 3)
    assert first[0] == first[-2] == first[-1] == 6.0
    assert len(first) == 7, "every wait has ended with PeerLost"
    assert all("it was closed here" in said for said in first[1:4])
    assert first[4] == "rank 0 waits no longer for the others: what they did together was ended"
    assert others == [[6.0, 6.0, 6.0]] * 2


def linked(world: World) -> Any:
    """What travels over the links between rank 0 and the others."""
    own = apart()
    flat: Any = own.group()
    found = flat.links()
    if own.rank:
        found[0].sendall(bytes([own.rank]))
        told = found[0].recv(1)
    else:
        told = b"".join(link.recv(1) for link in found)
        for link in found:
            link.sendall(b"!")
    for link in found:
        link.close()
    own.close()
    return told.decode("latin1")


def test_rank_0_has_a_link_to_each_other_rank_in_their_order() -> None:
    assert on_ranks(linked, 3) == ["\x01\x02", "!", "!"]

"""The agreement after a change of the membership: every rank's replica goes on from the latest update that is whole.

An update is made without a wait in it, so a rank that is interrupted has made it or has not: survivors are at step c or
at c + 1, where some had left the sum of the gradients and others had not, and a replacement is at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.comm.group import Group, broadcast_message, broadcast_tensors, collective, gather_messages
from apportion.comm.world import World
from apportion.core.python_state.python_state import PythonState
from apportion.core.strategy import PARTS, State
from apportion.errors import StateLost
from apportion.parallel.replica.replica import Replica


def furthest(steps: Sequence[int]) -> int | None:
    """Returns the first of the ranks that have made the most updates, given the number that each has made; None where
    no rank has made any."""
    return steps.index(max(steps)) if max(steps) else None


@collective
def agree(replica: Replica, world: World) -> None:
    """Give every rank the state of the replica that is furthest ahead. Called by all ranks of the world, each with a
    replica that is whole: what was begun after its last update is undone."""
    group = world.group()
    replica.roll_back()
    steps = group.all_gather(torch.tensor([replica.step], device=world.device)).flatten().tolist()
    if replica.carry is not None:
        raise StateLost("the recurrent state of a rank's rows died with it")
    source = furthest(steps)
    if source is None:  # all that are left are replacements, or nothing had been done
        raise StateLost("the state died with the last rank that had it")
    # Every update is the same on all ranks, so that as many updates are the same state.
    if min(steps) == max(steps):
        return
    state = replica.state() if world.rank == source else None
    found = broadcast_state(state, group, source=source, device=world.device)
    assert found is not None, "the source has a state"
    if replica.step < found.step:
        replica.load(found, slice(0, 0))


@collective
def share_python_state(replica: Replica, group: Group, device: torch.device, *, fresh: bool, moved: bool) -> None:
    """Give what the training keeps in Python to the ranks that are new (``fresh``), from one that is not. ``moved``:
    whether any of it has changed since the beginning. Called by all ranks, each of which is at the same step. Raises
    StateLost where no rank has it, or it cannot be carried."""
    new = group.all_gather(torch.tensor([int(fresh)], device=device)).flatten().tolist()
    if not any(new):
        return
    if all(new):
        if moved:
            raise StateLost("what the training keeps in Python died with the last rank that had it")
        return
    source = new.index(0)
    record, tensors = replica.python.record() if group.rank == source else (None, None)
    sent = broadcast_message(record, group, source=source, device=device)
    values = broadcast_tensors(tensors, group, source=source, device=device)
    if fresh:
        replica.python.load(sent, values)


@collective
def lose_what_differs(python: PythonState, group: Group, device: torch.device) -> None:
    """Note as lost what the training keeps in Python and the ranks do not have alike: one of them cannot stand for
    another. Called by all ranks, between two steps."""
    gathered = gather_messages(python.digests(), group, device=device)
    for name in dict.fromkeys(name for digests in gathered for name in digests):
        if len({digests.get(name) for digests in gathered}) > 1:
            python.lose(name, "not the same on every rank")


def broadcast_state(
    state: State | None, group: Group, *, source: int = 0, device: torch.device | None = None
) -> State | None:
    """The source's state on every rank; None where it has none."""
    if group.size == 1:
        return state
    head = None if state is None else {"step": state.step, "settings": state.settings}
    received = broadcast_message(head, group, source=source, device=device)
    if received is None:
        return None
    own = dict[str, Any](vars(state)) if state is not None else {}
    parts = {part: broadcast_tensors(own.get(part), group, source=source, device=device) for part in PARTS}
    return State(step=received["step"], settings=received["settings"], **parts)

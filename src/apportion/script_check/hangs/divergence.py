"""Where the calls of the ranks diverge: the first position of a group at which collectives do not fit together, and
messages of which one side is missing or unlike the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from apportion.script_check.hangs.states import Sequences
from apportion.script_check.record import Event, RankRecord

What = Literal["op", "shape", "type", "root", "reduction", "ranks", "parameters", "order", "count"]
SHAPES: frozenset[What] = frozenset(("shape", "type"))
SILENT: frozenset[What] = frozenset(("parameters", "order", "count"))
"""What no backend notices: tensors are combined that do not belong together, or a call has no counterpart."""
_EQUAL_INPUTS = {
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "gather", "reduce_scatter",
    "reduce_scatter_tensor", "verify_params_across_processes", "broadcast_coalesced", "all_gather_coalesced",
    "reduce_scatter_coalesced", "permute_tensor",
}  # fmt: skip
"""Operations to which all ranks have to give tensors of the same shapes."""
_EQUAL_OUTPUTS = {"scatter"}


@dataclass(frozen=True)
class Divergence:
    """The first position at which the calls of a group do not fit together. ``what`` differs; ``calls``: the call of
    each rank at that position, None for a rank that has not made one. ``ranks``: two ranks that differ."""

    group: str
    position: int
    what: What
    calls: Mapping[int, Event | None]
    ranks: tuple[int, int]


def conflicts(found: Sequences, records: Sequence[RankRecord]) -> list[Divergence]:
    """Returns for each group the first position at which two calls do not fit together, the earliest first."""
    networks = {record.rank: _values(record) for record in records}
    first = [divergence for group, calls in found.items() if (divergence := _first(group, calls, networks)) is not None]
    return sorted(first, key=lambda each: min(call["time"] for call in each.calls.values() if call is not None))


def _first(
    group: str, calls: Mapping[int, Sequence[Event]], networks: Mapping[int, Mapping[str, Any]]
) -> Divergence | None:
    for position in range(max(map(len, calls.values()), default=0)):
        here = calls_at(calls, position)
        there = [rank for rank, call in here.items() if call is not None]
        for rank in there[1:]:
            what = _conflict(here, there[0], rank, networks)
            if what is None and _swapped(calls, position, there[0], rank):
                what = "order"
            if what is not None:
                return Divergence(group, position, what, here, (there[0], rank))
    return None


def calls_at(calls: Mapping[int, Sequence[Event]], position: int) -> dict[int, Event | None]:
    """Returns the call that each rank made at a position of a group; None for a rank that has not made one."""
    return {rank: own[position] if position < len(own) else None for rank, own in calls.items()}


def surplus(found: Sequences) -> list[Divergence]:
    """Returns the groups in which a rank has made more calls than another, where all have ended."""
    divergences = list[Divergence]()
    for group, calls in found.items():
        fewest, most = (choose(calls, key=lambda rank: len(calls[rank])) for choose in (min, max))
        position = len(calls[fewest])
        if position < len(calls[most]):
            here = calls_at(calls, position)
            divergences.append(Divergence(group, position, "count", here, (most, fewest)))
    return divergences


def drift(calls: Mapping[int, Sequence[Event]], position: int, first: int, second: int) -> int | None:
    """Returns the position from which on two ranks of a group make calls that come from other places of the script, or
    in another step, up to the one at ``position``, at which they do not fit together; None where the calls before that
    come from the same places. So one rank left out a call, or made one too many, where the ranks part."""
    own, other = calls[first], calls[second]
    start = min(position, len(own), len(other))
    while start and any(own[start - 1][field] != other[start - 1][field] for field in ("site", "step")):
        start -= 1
    return start if start < min(position, len(own), len(other)) else None


def _conflict(
    here: Mapping[int, Event | None], first: int, second: int, networks: Mapping[int, Mapping[str, Any]]
) -> What | None:
    one, other = here[first], here[second]
    assert one is not None
    assert other is not None
    # Of several differences the first here counts, as it explains those that follow: other operations have other
    # tensors.
    if one["op"] != other["op"]:
        return "op"
    if one["root"] != other["root"] and one["op"] != "recv":
        return "root"
    if one.get("makes") != other.get("makes"):
        return "ranks"
    if one.get("reduces") != other.get("reduces"):
        return "reduction"
    tensors = _tensors(one, other, first, second)
    if tensors is not None:
        # Calls from different lines are not one call with unlike tensors: a rank is at another place of the script.
        return tensors if _same_place(one, other) else "op"
    return "parameters" if _other_parameters(one, other, networks[first], networks[second]) else None


def _tensors(one: Event, other: Event, first: int, second: int) -> What | None:
    """What differs between the tensors of two calls of the same operation that have to fit."""
    op = one["op"]
    if op in _EQUAL_INPUTS:
        pairs = (one["inputs"], other["inputs"])
    elif op in _EQUAL_OUTPUTS:
        pairs = (one["outputs"], other["outputs"])
    elif op == "all_gather" and one["outputs"] and other["outputs"]:
        at = {rank: position for position, rank in enumerate(one["ranks"])}
        if len(one["outputs"]) != len(at) or len(other["outputs"]) != len(at):
            return None
        pairs = (  # what a rank gives is what each has room for at its place
            [one["inputs"][0], one["outputs"][at[second]]],
            [other["outputs"][at[first]], other["inputs"][0]],
        )
    elif op == "all_to_all":
        at = {rank: position for position, rank in enumerate(one["ranks"])}
        if any(len(event[side]) != len(at) for event in (one, other) for side in ("inputs", "outputs")):
            return None
        pairs = (
            [one["inputs"][at[second]], one["outputs"][at[second]]],
            [other["outputs"][at[first]], other["inputs"][at[first]]],
        )
    elif op == "all_to_all_single":
        pairs = ([_row(each) for each in one["inputs"]], [_row(each) for each in other["inputs"]])
    else:
        return None
    left, right = ([_essential(shape) for shape, _ in each] for each in pairs)
    if left != right:
        return "shape"
    return "type" if [kind for _, kind in pairs[0]] != [kind for _, kind in pairs[1]] else None


def _same_place(one: Event, other: Event) -> bool:
    """Whether two calls are the same one in the script: made by the same line, about the same parameters."""
    return (one["site"], one["names"]) == (other["site"], other["names"])


def _essential(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of size 1, which change nothing of the order of the elements; (0,) for none."""
    return tuple(size for size in shape if size != 1) if math.prod(shape) else (0,)


def _row(tensor: tuple[tuple[int, ...], str]) -> tuple[tuple[int, ...], str]:
    """A tensor without its first dimension, whose parts go to other ranks and need not be of one size."""
    return tensor[0][1:], tensor[1]


def _other_parameters(one: Event, other: Event, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two calls combine unlike parameters, of which each rank has both, with different values: the two copies
    of a tied parameter have other names on the stages of a pipeline, and may be combined."""
    if one["gradient"] != other["gradient"] or len(one["names"]) != len(other["names"]):
        return False
    for left, right in zip(one["names"], other["names"], strict=True):
        if left and right and left != right:
            both = {left, right}
            if both <= first.keys() and both <= second.keys() and first[left].tobytes() != first[right].tobytes():
                return True
    return False


def _values(record: RankRecord) -> dict[str, Any]:
    """The values of each parameter before the first step, by name."""
    return {name: array for event in record.events_of("network") for name, array in event["weights"].items()}


def _swapped(calls: Mapping[int, Sequence[Event]], position: int, first: int, second: int) -> bool:
    """Whether two calls that look alike are made in another order by two ranks: each rank makes both in the same step,
    as often as the other rank in each step, but at exchanged positions."""
    one, other = calls[first][position], calls[second][position]
    texts = (one["line"], other["line"])
    if not all(texts) or texts[0] == texts[1] or one["step"] != other["step"]:
        return False
    later = next(
        (
            at
            for at in range(position + 1, min(len(calls[first]), len(calls[second])))
            if (calls[first][at]["line"], calls[second][at]["line"]) == texts[::-1]
        ),
        None,
    )
    if later is None or any(calls[rank][later]["step"] != one["step"] for rank in (first, second)):
        return False
    return all(
        len({_count(calls[rank], text, step) for rank in (first, second) for text in texts}) == 1
        for step in {event["step"] for rank in (first, second) for event in calls[rank] if event["line"] in texts}
    )


def _count(own: Sequence[Event], text: str, step: int) -> int:
    return sum(event["line"] == text and event["step"] == step for event in own)


Channel = tuple[str, int, int, int]
"""A group, the rank that sends, the rank that receives, and a tag: its messages arrive in order."""


@dataclass(frozen=True)
class Traffic:
    """The messages of one channel, in order, as begun by the rank that sends and by the rank that receives."""

    sent: Sequence[Event]
    received: Sequence[Event]


def traffic(records: Sequence[RankRecord]) -> Mapping[Channel, Traffic]:
    """Returns the messages by channel; receives from any rank are left out."""
    sent = defaultdict[Channel, list[Event]](list)
    received = defaultdict[Channel, list[Event]](list)
    for record in records:
        for event in record.events_of("collective"):
            if event["sequence"] is None and event["root"] is not None:
                tag = int(event.get("tag") or 0)
                if event["op"].startswith("send"):
                    sent[event["group"], record.rank, event["root"], tag].append(event)
                else:
                    received[event["group"], event["root"], record.rank, tag].append(event)
    return {channel: Traffic(sent[channel], received[channel]) for channel in {*sent, *received}}


def first_unlike_message(traffics: Mapping[Channel, Traffic]) -> tuple[Channel, Event, Event] | None:
    """Returns the first message that is sent with another number of elements, or type, than it is received with."""
    found = list[tuple[Channel, Event, Event]]()
    for channel, each in traffics.items():
        for send, receive in zip(each.sent, each.received, strict=False):
            gives, gets = send["inputs"], receive["outputs"]
            if (
                gives
                and gets
                and (_element_count(gives[0][0]), gives[0][1]) != (_element_count(gets[0][0]), gets[0][1])
            ):
                found.append((channel, send, receive))
                break
    return min(found, key=lambda each: each[1]["time"], default=None)


def unmatched_channel(traffics: Mapping[Channel, Traffic], rank: int, event: Event) -> Channel | None:
    """Returns the channel of a message that a rank waits for and whose counterpart no rank has begun; None where it is
    there, or for a receive from any rank."""
    for channel, each in traffics.items():
        own, other = (each.sent, each.received) if event["op"].startswith("send") else (each.received, each.sent)
        if rank in channel[1:3] and any(message is event for message in own):
            position = next(at for at, message in enumerate(own) if message is event)
            return channel if position >= len(other) else None
    return None


def _element_count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

"""Messages between two ranks: which sends and receives belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.script_check.record import Event, RankRecord

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
            if gives and gets and (_count(gives[0][0]), gives[0][1]) != (_count(gets[0][0]), gets[0][1]):
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


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

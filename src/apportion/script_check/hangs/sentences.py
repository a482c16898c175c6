"""How calls, tensors and states are written in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from apportion.script_check.hangs.states import RankState
from apportion.script_check.record import Event

_LISTED = 4
_OPERATIONS = {
    "ddp_backward": "the reduction of gradients in DistributedDataParallel's backward",
    "ddp_rebuild": "the agreement on the order of gradients in DistributedDataParallel's forward",
    "verify_params_across_processes": "the comparison of parameters as DistributedDataParallel is made",
    "broadcast_coalesced": "the broadcast of parameters or buffers by DistributedDataParallel",
}


def operation(call: Event) -> str:
    """Returns what a call is named: torch's function, or what DistributedDataParallel does."""
    return _OPERATIONS.get(call["op"], str(call["op"]))


def at_site(site: str) -> str:
    """Returns " at train.py:31"; nothing where the place is not known."""
    return f" at {site}" if site else ""


def describe_call(event: Event) -> str:
    """Returns a call with its place, its tensors and its group: "all_reduce at train.py:31 of float64 (24, 12)"."""
    parts = [operation(event) + at_site(event["site"])]
    if written := describe_tensors(event):
        parts.append(f"of {written}")
    if event["root"] is not None:
        word = {"send": "to", "send_object_list": "to", "reduce": "to", "gather": "to", "gather_object": "to"}
        parts.append(f"{word.get(event['op'], 'from')} rank {event['root']}")
    if event.get("makes"):
        parts.append(f"for ranks {event['makes']}")
    if event["group"] != "world":
        parts.append(f"in the group of {event['group']}")
    return " ".join(parts)


def describe_tensors(event: Event) -> str:
    """Returns the tensors that a rank gives in a call, or gets: type, shape, and the parameter they belong to."""
    listed = list(event["inputs"] or event["outputs"])
    if not listed:
        return ""
    names = [*event["names"], *[""] * len(listed)]
    gradient = [*event["gradient"], *[False] * len(listed)]
    written = list[str]()
    for (shape, kind), name, of_gradient in zip(listed, names, gradient, strict=False):
        owner = f", {'the gradient of ' if of_gradient else ''}{name}" if name else ""
        written.append(f"{kind} {shape_of(shape)}{owner}")
    rest = len(written) - _LISTED
    return ", ".join(written[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def shape_of(shape: Sequence[int]) -> str:
    """Returns a shape as torch writes it."""
    return f"[{', '.join(map(str, shape))}]"


def list_ranks(numbers: Sequence[int]) -> str:
    """Returns "rank 1", or "ranks 0, 1 and 3"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def capitalized(sentence: str) -> str:
    """Returns a sentence with a capital letter."""
    return sentence[:1].upper() + sentence[1:]


def describe_state(each: RankState) -> str:
    """Returns what a rank was doing, as a clause: "rank 0 waits in all_reduce at train.py:31 ..."."""
    rank = f"rank {each.rank}"
    if each.how == "waits":
        assert each.waiting is not None
        awaited = each.waiting.call
        if awaited is None:
            return f"{rank} waits for a collective{at_site(each.waiting.site)}"
        number = "" if awaited["sequence"] is None else f", its call {awaited['sequence'] + 1} in that group"
        begun = "" if awaited["site"] == each.waiting.site else f" (waited for{at_site(each.waiting.site)})"
        return f"{rank} waits in {describe_call(awaited)}{begun}{number}"
    if each.how == "raised":
        assert each.outcome is not None
        return f"{rank} raised {each.outcome['type']}: {first_line(each.outcome['message'])}{at_site(each.site)}"
    if each.how == "ended":
        assert each.outcome is not None
        exited = each.outcome["how"] == "exited"
        how = f"left the script with status {each.outcome.get('code')}" if exited else "reached the end of the script"
        return f"{rank} {'has made all of its steps' if each.outcome['how'] == 'enough steps' else how}"
    if each.how == "died":
        return f"{rank}'s process ended without an exception" + (at_site(each.site) or "")
    return f"{rank} {'waits for a batch of its DataLoader' if each.how == 'loading' else 'is'}{at_site(each.site)}"


def first_line(message: str) -> str:
    """Returns the first line of a message, shortened to 200 characters."""
    return shorten(message.strip().partition("\n")[0], 200, placeholder=" ...")

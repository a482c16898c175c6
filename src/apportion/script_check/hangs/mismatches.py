"""Findings about calls at the same position of a group that do not fit together."""

from __future__ import annotations

from apportion.script_check.findings import Finding
from apportion.script_check.hangs import sentences
from apportion.script_check.hangs.divergence import SHAPES, Divergence, What
from apportion.script_check.hangs.messages import Channel
from apportion.script_check.record import Event

_REMEDIES: dict[What, str] = {
    "op": "Have all ranks of a group make the same collectives in the same order: move the call out of the branch that "
    "only some ranks run.",
    "shape": "Give tensors of the same shape on all ranks: pad them, or exchange their sizes first.",
    "type": "Give tensors of the same element type on all ranks.",
    "root": "Name the same rank as source or destination on all ranks.",
    "reduction": "Pass the same reduction on all ranks.",
    "ranks": "Make each group on all ranks, members or not, with the same list of ranks and in the same order.",
    "parameters": "Reduce the same list of parameters on all ranks, and a zero where a parameter has no gradient.",
    "order": "Make the collectives in the same order on all ranks.",
    "count": "Have all ranks of a group make the same number of collectives.",
}


def diverging(divergence: Divergence) -> str:
    """Returns the sentence about a divergence, without its full stop: the call that each rank makes in its place."""
    group = "the group of all ranks" if divergence.group == "world" else f"the group of {divergence.group}"
    by_text = dict[str, list[int]]()
    for rank, call in divergence.calls.items():
        by_text.setdefault("" if call is None else sentences.describe_call(call), []).append(rank)
    calls = "; ".join(
        f"on {sentences.list_ranks(ranks)} it is {text}" if text else f"{sentences.list_ranks(ranks)} made no such call"
        for text, ranks in by_text.items()
    )
    return f"The collectives of the ranks diverge at call {divergence.position + 1} of {group}: {calls}"


def mismatch(divergence: Divergence, uneven: str = "", even: str = "") -> Finding:
    """Returns the finding about a divergence. ``uneven``: a sentence about loaders that gave unequal numbers of
    batches, and ``even`` the remedy against that."""
    one, other = (divergence.calls[rank] for rank in divergence.ranks)
    first = one or other
    assert first is not None
    silent = {
        "parameters": " Different parameters are combined.",
        "order": " Different tensors are combined.",
    }.get(divergence.what, "")
    sentence = f"{diverging(divergence)}.{silent}"
    remedy = _REMEDIES[divergence.what]
    if divergence.what == "op" and uneven:
        sentence, remedy = f"{sentence} {uneven}", even
    names = tuple(dict.fromkeys(n for call in (one, other) if call is not None for n in call["names"] if n))
    name = "shape_mismatch" if divergence.what in SHAPES else "diverged_collectives"
    return Finding(name, "difference", sentence, remedy, names, divergence.ranks, first["step"] + 1, first["site"])


def unlike_message(channel: Channel, send: Event, receive: Event) -> Finding:
    """Returns the finding about a message that does not fit into what it is received with."""
    sender, receiver = channel[1:3]
    sentence = (
        f"Rank {sender} sends {sentences.describe_tensors(send)}{sentences.at_site(send['site'])} to rank {receiver}, "
        f"which receives {sentences.describe_tensors(receive)}{sentences.at_site(receive['site'])}."
    )
    return Finding(
        "shape_mismatch",
        "difference",
        sentence,
        _REMEDIES["shape"],
        (),
        (sender, receiver),
        send["step"] + 1,
        send["site"],
    )

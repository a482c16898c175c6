"""The report about a pass: why its ranks wait for each other, and what its collectives show although none waits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from apportion.script_check.findings import Finding
from apportion.script_check.hangs import sentences
from apportion.script_check.hangs.divergence import (
    SHAPES,
    SILENT,
    Channel,
    Divergence,
    What,
    calls_at,
    conflicts,
    drift,
    first_unlike_message,
    surplus,
    traffic,
    unmatched_channel,
)
from apportion.script_check.hangs.states import RankState, Sequences, sequences, stack_lines, states
from apportion.script_check.record import Event, RankRecord


@dataclass(frozen=True)
class Hang:
    """``finding``: why the ranks wait. ``all_wait``: whether each rank that has not ended is in a
    collective. ``lines``: what each rank was doing, with the innermost call and the user's
    frames, to be printed. ``details``: the whole, as plain values."""

    finding: Finding
    all_wait: bool = True
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def hang(
    records: Sequence[RankRecord],
    dumps: Mapping[int, str],
    *,
    died: Sequence[int] = (),
    quiet: float = 0.0,
    folder: str = "",
) -> Hang | None:
    """Returns why the ranks of a pass wait for each other; None where none waits for another.

    ``dumps``: the text of ``faulthandler`` about each rank that had not ended; ``died``: the ranks whose process ended
    without an event ``end``; ``quiet``: for how many seconds nothing went on; ``folder``: of the script.
    """
    found = states(records, dumps, died, folder)
    why = cause(records, found)
    if why is None:
        return None
    lines = list[str]()
    for state in found:
        lines.append(sentences.capitalized(sentences.describe_state(state)))
        if state.stacks:
            lines += [f"    {line}" for line in stack_lines(state.stacks[0], folder)]
    all_wait = not any(state.how in ("loading", "elsewhere") for state in found)
    return Hang(why.finding, all_wait, tuple(lines), _details(why, found, quiet))


def findings(records: Sequence[RankRecord]) -> list[Finding]:
    """Returns what the collectives of ranks that have all ended show: calls that do not fit together, of which the
    backend has taken no notice. None are compared under torch's ``Join``, by which a rank that has no more batches
    answers the collectives of the others with calls of its own."""
    if records and all(record.events_of("join") for record in records):
        return []
    calls = sequences(records)
    found = silent_divergences(records)
    found += [mismatch(each) for each in conflicts(calls, records) if each.what not in SILENT]
    pair = first_unlike_message(traffic(records))
    found += [] if pair is None else [unlike_message(*pair)]
    if not found and all(record.outcome is not None and record.outcome["how"] == "ended" for record in records):
        found = [mismatch(each) for each in surplus(calls)]
    return found


def silent_divergences(records: Sequence[RankRecord]) -> list[Finding]:
    """Returns the divergences that no backend notices, and by which ranks do not wait: unlike tensors are combined."""
    return [mismatch(each) for each in conflicts(sequences(records), records) if each.what in SILENT]


def _details(why: Cause, found: Sequence[RankState], quiet: float) -> dict[str, Any]:
    return {
        "quiet_seconds": round(quiet, 1),
        "first_divergence": None if why.divergence is None else _divergence(why.divergence),
        "ranks": [
            {
                "rank": state.rank,
                "state": state.how,
                "site": state.site,
                "steps": state.steps,
                "collective": _call(state.call),
                "last_collective": _call(state.last),
                "outcome": None if state.outcome is None else {k: v for k, v in state.outcome.items() if k != "kind"},
                "stacks": [
                    {
                        "thread": stack.thread,
                        "frames": [[frame.file, frame.line, frame.function] for frame in stack.frames],
                    }
                    for stack in state.stacks
                ],
            }
            for state in found
        ],
    }


def _divergence(divergence: Divergence) -> dict[str, Any]:
    return {
        "group": divergence.group,
        "sequence": divergence.position,
        "differs": divergence.what,
        "calls": {str(rank): _call(call) for rank, call in divergence.calls.items()},
    }


def _call(call: Event | None) -> dict[str, Any] | None:
    if call is None:
        return None
    fields = ("op", "group", "sequence", "root", "inputs", "outputs", "names", "gradient", "site", "line")
    return {name: call[name] for name in fields}


# Why ranks wait: from the states of all ranks and their sequences of collectives to one finding.


_EVEN = (
    "Give all ranks the same number of batches (DistributedSampler, drop_last=True), or run the loop in "
    "`with model.join():`."
)


@dataclass(frozen=True)
class Cause:
    """A finding, and the divergence that it rests on, if any."""

    finding: Finding
    divergence: Divergence | None = None


def cause(records: Sequence[RankRecord], states: Sequence[RankState]) -> Cause | None:
    """Returns why ranks wait for each other; None where none waits for another."""
    calls = sequences(records)
    waiting = [state for state in states if state.how == "waits"]
    left = [state for state in states if state.how in ("raised", "ended", "died")]
    if not waiting and len(left) == len(states):
        return None
    # From the cause that explains most to the one that only says who waits: a step that is left out, calls that do not
    # fit together, messages that do not, an error, an end, a missing counterpart, and a rank that is still busy.
    hard = [each for each in conflicts(calls, records) if each.what not in SILENT]
    if (skipped := _skipped_step(calls)) is not None:
        return Cause(skipped)
    if hard:
        finding = mismatch(hard[0], uneven_batches(records), _EVEN)
        return Cause(replace(finding, sentence=finding.sentence + _drift(calls, hard[0])), hard[0])
    messages = traffic(records)
    if (pair := first_unlike_message(messages)) is not None:
        return Cause(unlike_message(*pair))
    absence = _absence(calls, waiting)
    raised = [state for state in states if state.how == "raised"]
    if raised:
        return Cause(_raised(raised, waiting, records), absence)
    if left and any(_needs(state, {each.rank for each in left}) for state in waiting):
        return Cause(_left_early(left, waiting, records, _drift(calls, absence)), absence)
    for state in waiting:
        call = state.call
        if call is not None and call["op"].startswith(("send", "recv")):
            channel = unmatched_channel(messages, state.rank, call)
            if channel is not None or call["root"] is None:
                return Cause(_unmatched(state, call, channel, states))
    return Cause(_waiting(states, absence, _drift(calls, absence)), absence)


def _skipped_step(calls: Sequences) -> Finding | None:
    """The finding that ranks make an optimizer step which others leave out: they are where gradients are recorded
    before a step, by collectives that sharded ones take, and the others are in calls of the script. Without a record
    they would not wait."""
    for own in calls.values():
        for here in zip(*own.values(), strict=False):
            made = next(
                (call for call in here if call["kind"] == "recorder_collective" and any(call["gradient"])), None
            )
            call = next((call for call in here if call["kind"] == "collective"), None)
            if made is not None and call is not None:
                ranks = dict(zip(map(id, here), own, strict=True))
                return _left_out(ranks[id(made)], made, ranks[id(call)], call)
    return None


def _left_out(rank: int, made: Event, other: int, call: Event) -> Finding:
    sentence = (
        f"Rank {rank} makes optimizer step {made['step'] + 1}, and rank {other} leaves it out: it has gone on with "
        f"{call['op']} at {call['site']}, and their shards of the weights part."
    )
    remedy = "Decide on all ranks alike whether a step is made, by a sum over the ranks of what is decided on."
    return Finding(
        "skipped_steps", "difference", sentence, remedy, ranks=(other,), step=made["step"] + 1, site=made["site"]
    )


def _needs(state: RankState, ranks: set[int]) -> bool:
    """Whether a rank waits in a call that one of some ranks would have to make."""
    call = state.call
    if call is None:
        return True
    if call["op"].startswith(("send", "recv")) and call["root"] is not None:
        return call["root"] in ranks
    return not call["ranks"] or bool(ranks & {*call["ranks"]})


def _absence(calls: Sequences, waiting: Sequence[RankState]) -> Divergence | None:
    """The first call in which a rank waits and that another has not made."""
    found = list[Divergence]()
    for state in waiting:
        call = state.call
        if call is not None and call["sequence"] is not None:
            group, position = call["group"], call["sequence"]
            here = calls_at(calls[group], position)
            absent = [rank for rank, other in here.items() if other is None]
            if absent:
                found.append(Divergence(group, position, "count", here, (state.rank, absent[0])))
    return min(found, key=lambda each: min(c["time"] for c in each.calls.values() if c is not None), default=None)


def _raised(raised: Sequence[RankState], waiting: Sequence[RankState], records: Sequence[RankRecord]) -> Finding:
    # Others may have raised because this rank left them alone.
    first = min(raised, key=lambda state: state.outcome["time"] if state.outcome else 0.0)
    assert first.outcome is not None
    others = "".join(f"; {sentences.describe_state(state)}" for state in waiting)
    line = f" (`{first.outcome['line']}`)" if first.outcome.get("line") else ""
    sentence = f"{sentences.capitalized(sentences.describe_state(first))}{line}{others}."
    names = _without_gradient(first, records)
    if names:
        sentence += f" Its backward reached no gradient of {', '.join(names)}."
        remedy = (
            "Have the loss depend on all parameters on all ranks, or pass find_unused_parameters=True to "
            "DistributedDataParallel."
        )
        return Finding(
            "unused_parameters", "difference", sentence, remedy, names, (first.rank,), _step(first), first.site
        )
    remedy = f"Correct the error on rank {first.rank}, or have all ranks decide alike to leave out the step."
    return Finding("rank_raised", "difference", sentence, remedy, (), (first.rank,), _step(first), first.site)


def _without_gradient(state: RankState, records: Sequence[RankRecord]) -> tuple[str, ...]:
    """The parameters that DistributedDataParallel's error names by number."""
    assert state.outcome is not None
    match = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", state.outcome["message"])
    made = next(record for record in records if record.rank == state.rank).events_of("ddp")
    if match is None or not made:
        return ()
    names = [name for name, _, _ in made[-1]["parameters"]]
    return tuple(names[number] for number in map(int, re.findall(r"\d+", match[1])) if number < len(names))


def _left_early(
    left: Sequence[RankState], waiting: Sequence[RankState], records: Sequence[RankRecord], drift_sentence: str
) -> Finding:
    died = [state for state in left if state.how == "died"]
    first = (died or list(left))[0]
    ranks = tuple(state.rank for state in (died or left))
    others = "; ".join(sentences.describe_state(state) for state in waiting)
    sentence = f"{sentences.capitalized(sentences.describe_state(first))} while {others}.{drift_sentence}"
    if died:
        remedy = f"Find out why the process of rank {first.rank} ended: its output may say so."
        return Finding("rank_died", "difference", sentence, remedy, (), ranks, _step(first), first.site)
    unequal = uneven_batches(records)
    remedy = "Have all ranks reach the same collectives before one of them leaves the script."
    if unequal:
        sentence, remedy = f"{sentence} {unequal}", _EVEN
    place = waiting[0].site if waiting else first.site
    return Finding("rank_ended_early", "difference", sentence, remedy, (), ranks, _step(first), place)


def _unmatched(state: RankState, call: Event, channel: Channel | None, states: Sequence[RankState]) -> Finding:
    sends = call["op"].startswith("send")
    others = "; ".join(sentences.describe_state(each) for each in states if each.rank != state.rank)
    peer = call["root"]
    lacks = "receives" if sends else "sends"
    who = "no rank" if peer is None else f"rank {peer}"
    tag = f" with tag {channel[3]}" if channel is not None and channel[3] else ""
    counterpart = (
        f"{who} {lacks} nothing that belongs to it{tag}"
        if peer is None
        else (f"{who} has made no {'receive' if sends else 'send'} that belongs to it{tag}")
    )
    sentence = f"{sentences.capitalized(sentences.describe_state(state))}, and {counterpart}; {others}."
    remedy = "Pair each receive with a send of the same tag by the other rank, in the same order on both sides."
    ranks = (state.rank,) if peer is None else (state.rank, peer)
    name = "unmatched_send" if sends else "unmatched_receive"
    return Finding(name, "difference", sentence, remedy, (), ranks, _step(state), state.site)


def _waiting(states: Sequence[RankState], absence: Divergence | None, drift_sentence: str) -> Finding:
    """Ranks wait in calls that do not contradict each other: other ranks are still running and have not arrived."""
    waiting = [state for state in states if state.how == "waits"]
    others = [state for state in states if state.how in ("loading", "elsewhere")]
    clauses = "; ".join(sentences.describe_state(state) for state in states)
    if absence is not None:
        absent = [rank for rank, call in absence.calls.items() if call is None]
        clauses = "; ".join(sentences.describe_state(state) for state in states if state.rank in absent)
    begin = "The ranks do not go on: " if absence is None else f"{diverging(absence)}; "
    sentence = f"{begin}{clauses}.{drift_sentence}"
    first = (others or waiting)[0]
    if others:
        name = "hang"
        remedy = f"Find out what rank {first.rank} waits for{sentences.at_site(first.site)}."
        if first.how == "loading":
            remedy = f"Find out why the loader processes of rank {first.rank} yield no batch; try num_workers=0."
    else:
        name = "diverged_collectives"
        remedy = "Have all ranks of each group call its collectives, in the same order."
    return Finding(
        name, "difference", sentence, remedy, (), tuple(s.rank for s in (others or waiting)), _step(first), first.site
    )


def _drift(calls: Sequences, divergence: Divergence | None) -> str:
    """The sentence on where two ranks first made calls from different lines of the script; empty if only at the end."""
    if divergence is None:
        return ""
    one, other = divergence.ranks
    own = calls[divergence.group]
    start = drift(own, divergence.position, one, other)
    if start is None:
        return ""
    first, second = own[one][start], own[other][start]
    return (
        f" They part at call {start + 1}, which is {sentences.describe_call(first)} in step {first['step'] + 1} on "
        f"rank {one} and {sentences.describe_call(second)} in step {second['step'] + 1} on rank {other}."
    )


def _step(state: RankState) -> int | None:
    return state.steps + 1


def uneven_batches(records: Sequence[RankRecord]) -> str:
    """Returns a sentence about the last iteration over a loader that one rank has read to its end while another rank
    had more batches; an empty string where all ranks read the same number."""
    counts = [_counts(record) for record in records]
    ends = [{(e["loader"], e["iteration"]) for e in record.events_of("exhausted")} for record in records]
    for place in sorted({place for each in ends for place in each}, key=lambda each: -each[1]):
        for record, own, ended in zip(records, counts, ends, strict=True):
            others = [(each[place], other.rank) for each, other in zip(counts, records, strict=True) if place in each]
            most, rank = max(others, default=(0, 0))
            if place in ended and own.get(place, 0) < most:
                return (
                    f"The loader of {place[0]} gave rank {record.rank} {own.get(place, 0)} batches and rank {rank} at "
                    f"least {most} in epoch {place[1] + 1}."
                )
    return ""


def _counts(record: RankRecord) -> dict[tuple[str, int], int]:
    found = dict[tuple[str, int], int]()
    for event in record.events_of("batch"):
        place = event["loader"], event["iteration"]
        found[place] = found.get(place, 0) + 1
    return found


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
    silent = {"parameters": " Different parameters are combined.", "order": " Different tensors are combined."}.get(
        divergence.what, ""
    )
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
    remedy = _REMEDIES["shape"]
    return Finding(
        "shape_mismatch", "difference", sentence, remedy, (), (sender, receiver), send["step"] + 1, send["site"]
    )

"""Gradients that are not averaged over the ranks, so that each rank trains on its own rows alone, and gradients of
different parameters that were added to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from apportion.script_check.comparison.combination import EXACT, combination
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import Array, listed
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event


def cause(evidence: Evidence) -> Finding | None:
    """Returns the finding that gradients are not averaged; None where all are."""
    if (mistimed := _flag_set_late(evidence) or _averaged_early(evidence)) is not None:
        return mistimed
    alone = [name for name in evidence.found.names if name in evidence.unaveraged]
    if not alone or len(alone) < len(evidence.found.names):
        return None
    first = evidence.ranks[0]
    alone += _unmanaged(evidence)
    if len(evidence.unaveraged) == len([name for name in evidence.found.compared if name in evidence.reference]):
        sentence, remedy, site = _nothing_averaged(evidence, first.events_of("wrapper")) or _partly_averaged(
            evidence, alone
        )
    else:
        sentence, remedy, site = _partly_averaged(evidence, alone)
    return evidence.finding("not_averaged", sentence, remedy, tensors=evidence.shown(alone), site=site)


def _unmanaged(evidence: Evidence) -> list[str]:
    """The tensors whose gradient is zero at this step, and that no wrapper manages either."""
    first, step = evidence.ranks[0], evidence.steps[0]
    if step is None or not (first.events_of("wrapped") or evidence.is_sharded):
        return []
    wrapped = {name for event in first.events_of("wrapped") for name in event["names"]}
    managed = {evidence.names[0].get(name, name) for name in (*wrapped, *step["placements"])}
    return [
        name
        for name in evidence.found.compared
        if name not in managed
        and name not in evidence.found.names
        and name in evidence.reference
        and not evidence.reference[name].any()
    ]


def _flag_set_late(evidence: Evidence) -> Finding | None:
    """The flag that arms the average of a window's last micro-batch is set between its forward and its backward."""
    late = evidence.window(evidence.ranks[0], "late_flag")
    if not late or evidence.ranks_agree:
        return None
    sentence = (
        "Gradients are not averaged over the ranks in every window of micro-batches: require_backward_grad_sync is set "
        "after the forward of the micro-batch that should average, and DistributedDataParallel reads it "
        "in its forward."
    )
    remedy = "Set the flag, or leave no_sync(), before the forward of a window's last micro-batch."
    return evidence.finding("not_averaged", sentence, remedy, site=late[0]["site"])


def _averaged_early(evidence: Evidence) -> Finding | None:
    """The average is made before the last micro-batch of a window, and later micro-batches are not averaged."""
    if evidence.ranks_agree:
        return None
    calls = defaultdict[int, list[Event]](list)
    for event in evidence.window(evidence.ranks[0], "wrapper_forward"):
        if event["gradients"]:
            calls[event["index"]].append(event)
    for index, forwards in calls.items():
        names = _wrapped_names(evidence, index)
        averaged = [at for at, forward in enumerate(forwards, 1) if forward["sync"]]
        if not averaged or averaged[-1] == len(forwards) or not set(evidence.found.names) <= names:
            continue
        return evidence.finding(
            "not_averaged",
            f"Of the {len(forwards)} micro-batches of a step, the last one that DistributedDataParallel averages over "
            f"the ranks is number {averaged[-1]}: what later ones add to the gradient is averaged by nothing, as "
            "their forwards run inside of no_sync().",
            "Leave no_sync() for the forward and backward of the last micro-batch of a step, which averages what all "
            "of them have added.",
            site=forwards[-1]["site"],
        )
    return None


def _wrapped_names(evidence: Evidence, index: int) -> set[str]:
    """The names in one process of what a wrapper was given."""
    events = [event for event in evidence.ranks[0].events_of("wrapped") if event["index"] == index]
    return {evidence.names[0].get(name, name) for event in events for name in event["names"]}


def _nothing_averaged(evidence: Evidence, wrappers: Sequence[Event]) -> tuple[str, str, str] | None:
    """No gradient of this optimizer is averaged; None where a wrapper averages, but not its parameters."""
    intro = "No gradient is averaged over the ranks: each rank trains on its own rows alone, because "
    first = evidence.ranks[0]
    if wrappers and all(wrapper["group"] == 1 for wrapper in wrappers):
        return (
            f"{intro}DistributedDataParallel was given a process group of 1 rank, where {evidence.count} hold the same "
            "parameters.",
            "Pass the process group of all ranks that hold the same parameters.",
            wrappers[0]["site"],
        )
    forwards = evidence.window(first, "wrapper_forward")
    plain = evidence.window(first, "forward")
    if wrappers and not any(forward["gradients"] for forward in forwards):
        return (
            f"{intro}the forward of the wrapped module is never called; the module inside of it is called instead.",
            "Call the module that DistributedDataParallel returned, and not its attribute module.",
            next(
                (forward["caller"] or forward["site"] for forward in plain if forward["gradients"]), evidence.found.site
            ),
        )
    if wrappers and not any(forward["sync"] for forward in forwards if forward["gradients"]):
        return (
            f"{intro}no forward of the wrapped module is made with require_backward_grad_sync, or outside of "
            f"no_sync().",
            "Make the forward and backward of a window's last micro-batch outside of no_sync().",
            next((forward["site"] for forward in forwards), evidence.found.site),
        )
    if evidence.is_sharded and (group := _group_of_one(evidence)):
        return (
            f"{intro}fully_shard was given a mesh of 1 rank, where {evidence.count} hold the same parameters.",
            "Pass the mesh of all ranks that hold the same parameters (flatten its data and sequence dimensions).",
            group,
        )
    if wrappers:
        return None
    return (
        f"{intro}no wrapper and no collective averages them before the optimizer's step.",
        "Wrap the module in DistributedDataParallel, or average the gradients after backward and before the step.",
        evidence.found.site,
    )


def _partly_averaged(evidence: Evidence, alone: Sequence[str]) -> tuple[str, str, str]:
    """Some gradients are averaged, and these are not."""
    first = evidence.ranks[0]
    shown = listed(evidence.shown(alone))
    their = "its gradient" if len(alone) == 1 else "their gradients"
    verb = "is" if len(alone) == 1 else "are"
    they = "it" if len(alone) == 1 else "them"
    site = site_of(evidence, alone[0])
    if _are_parts(evidence, alone):
        return (
            f"{shown}: each rank has only its own part of the gradient, and no collective adds the parts up.",
            f"Sum {their} over the ranks of the group by an all_reduce, after backward.",
            site,
        )
    intro = f"{shown} {verb} trained, and no wrapper or collective averages {they} over the ranks"
    own = {union: rank for rank, union in evidence.names[0].items()}
    names = [own.get(name, name) for name in alone]
    if wrapped := first.events_of("wrapped"):
        ignored = {each for wrapper in first.events_of("wrapper") for each in wrapper["ignored"]}
        if any(name.endswith(each) for name in names for each in ignored):
            return f"{intro}: DistributedDataParallel was given {they} to ignore.", _averaged(their), site
        if (caller := _past_wrapper(evidence, alone)) is not None:
            return (
                f"{intro}: the forward of DistributedDataParallel around {they} is never called; the module inside of "
                "it, or a method of that module, is called instead.",
                "Call the module that DistributedDataParallel returned, and not its attribute module or a method of "
                "that: have the wrapped module's forward compute what the method does.",
                caller or site,
            )
        paths = [each["path"] for each in wrapped if each["path"]]
        if all(any(name.startswith(f"{path}.") for path in paths) for name in names):
            return (
                f"{intro}: {'it was' if they == 'it' else 'they were'} not among the trainable parameters that "
                "DistributedDataParallel was given (replaced, added or made trainable after the wrap).",
                "Replace, add and unfreeze parameters before the module is wrapped.",
                site,
            )
        return (
            f"{intro}: {'it lies' if they == 'it' else 'they lie'} outside of the wrapped module.",
            "Wrap a module that contains all trained parameters, or wrap this one as well.",
            site,
        )
    if evidence.is_sharded:
        tensor = "it is an ordinary tensor" if they == "it" else "they are ordinary tensors"
        if any(name in event["names"] for event in first.events_of("ignored") for name in names):
            return f"{intro}: {tensor} that fully_shard was given to ignore (ignored_params).", _averaged(their), site
        if _inside_sharded(first.events_of("network"), names[0]):
            return (
                f"{intro}: {tensor} that came into the module after fully_shard was called on it.",
                "Replace and add parameters before fully_shard is called on the module that holds them.",
                site,
            )
        return (
            f"{intro}: {tensor} that no fully_shard call manages, as the root was not sharded.",
            "Call fully_shard on the root module as well.",
            site,
        )
    return f"{intro}.", _averaged(their), site


def _past_wrapper(evidence: Evidence, alone: Sequence[str]) -> str | None:
    """The line that calls what is inside of wrappers which were given some tensors and whose forward is not called; ""
    where the line is not known, None where it is called, or they were not given the tensors."""
    first = evidence.ranks[0]
    called = {event["index"] for event in evidence.window(first, "wrapper_forward") if event["gradients"]}
    silent = {event["index"] for event in first.events_of("wrapped")} - called
    if not set(alone) <= {name for index in silent for name in _wrapped_names(evidence, index)}:
        return None
    forwards = evidence.window(first, "forward")
    return next((event["caller"] for event in forwards if event["gradients"] and event["caller"]), "")


def _are_parts(evidence: Evidence, alone: Sequence[str]) -> bool:
    """Whether the gradients of one process are the plain sum of the ranks' own, while no wrapper averages others."""
    if evidence.ranks[0].events_of("wrapper") or evidence.is_sharded:
        return False
    reference = {name: evidence.reference[name] for name in alone if name in evidence.reference}
    made = combination(reference, evidence.own_gradients, evidence.bounds.relative)
    return made.exact and all(evidence.near(factor, 1.0, 1e-7) for factor in made.factors)


def _averaged(their: str) -> str:
    return f"Average {their} over the ranks: an all_reduce after backward, divided by the number of ranks."


def _inside_sharded(networks: Sequence[Event], name: str) -> bool:
    """Whether a parameter lies in a module that fully_shard was called on."""
    parts = name.split(".")
    above = {".".join(parts[:at]) for at in range(1, len(parts))}
    return any(
        kind.startswith("FSDP") and module in above for event in networks for module, kind in event["modules"].items()
    )


def _group_of_one(evidence: Evidence) -> str:
    """The line that makes a network whose parameters are sharded over a mesh of one rank; empty where it is not
    known."""
    for event in evidence.ranks[0].events_of("network"):
        if event["groups"] and all(len(group) == 1 for group in event["groups"].values()):
            return str(event["sites"].get(event["label"]) or event["site"])
    return ""


def site_of(evidence: Evidence, name: str) -> str:
    """Returns the line that makes the module which holds a tensor; the line of the step where that is not known."""
    own = {union: rank for rank, union in evidence.names[0].items()}.get(name, name)
    for event in evidence.ranks[0].events_of("network"):
        module = own.rpartition(".")[0]
        if event["sites"].get(module):
            return str(event["sites"][module])
    return evidence.found.site


def different_lists(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks reduce different lists of gradients; None where each is added to its own."""
    for difference in evidence.found.differences:
        rank, name = difference.rank, difference.name
        given = evidence.gradients[rank].get(name)
        if given is None:
            continue
        most = max(EXACT, evidence.bounds.relative)
        if combination({name: given}, [{name: a} for a in _own_gradients(evidence, name)]).residual < most:
            continue
        for other, other_name, array in _other_gradients(evidence, rank, name, given):
            own = evidence.own_gradients[rank].get(name)
            parts = [{name: array}] if own is None else [{name: own}, {name: array}]
            made = combination({name: given}, parts, evidence.bounds.relative)
            if made.exact and abs(made.factors[-1]) > most:
                first, second = evidence.shown([name, other_name])
                names = dict.fromkeys([name, *evidence.found.names])
                return evidence.finding(
                    "different_lists",
                    f"The gradient of {first} on rank {rank} was added to that of {second} on rank {other}: the ranks "
                    "reduce different lists of gradients.",
                    "Reduce the gradients of the same parameters in the same order on all ranks, with zeros where a "
                    "rank "
                    "has none.",
                    tensors=evidence.shown(list(names)),
                    ranks=(rank, other),
                )
    return None


def _own_gradients(evidence: Evidence, name: str) -> list[Array]:
    return [own[name] for own in evidence.own_gradients if name in own]


def _other_gradients(evidence: Evidence, rank: int, name: str, like: Array) -> list[tuple[int, str, Array]]:
    return [
        (other, each, array)
        for other, own in enumerate(evidence.own_gradients)
        if other != rank
        for each, array in own.items()
        if each != name and array.shape == like.shape
    ]

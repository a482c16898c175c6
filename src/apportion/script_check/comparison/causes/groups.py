"""Tensors of pipelines and tensor-parallel groups that are wired otherwise than in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from apportion.script_check.comparison.combination import proportional
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.reading import row_digests
from apportion.script_check.comparison.tensors import initial
from apportion.script_check.findings import Finding


def tied(evidence: Evidence) -> Finding | None:
    """Returns the finding that one parameter of one process is two tensors of two ranks, each with a part of the
    gradient."""
    for name in evidence.found.names:
        copies = [
            (rank, own)
            for rank, names in enumerate(evidence.names)
            for own, union in names.items()
            if union == name and own in _trained(evidence, rank)
        ]
        if len({rank for rank, _ in copies}) < 2 or len({own for _, own in copies}) < 2:
            continue
        short = [own.partition(".")[2] or own for _, own in copies]
        names = short if len(set(short)) > 1 else [own for _, own in copies]
        listed = " and ".join(f"{own} on rank {rank}" for own, (rank, _) in zip(names, copies, strict=True))
        return evidence.finding(
            "tied_apart",
            f"{listed} are one parameter in one process (tied weights); here they are {len(copies)} tensors, each with "
            "only its own part of the gradient.",
            "Add the gradients of the copies over the ranks that hold them, after backward and before the step.",
            tensors=tuple(dict.fromkeys(names)),
            ranks=tuple(rank for rank, _ in copies),
        )
    return None


def _trained(evidence: Evidence, rank: int) -> set[str]:
    step = evidence.steps[rank]
    return set() if step is None else set(step["gradients"])


def inputs(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks of one tensor-parallel group were given different inputs."""
    if evidence.is_sharded:
        return None
    groups = defaultdict[tuple[int, ...], list[str]](list)
    for event in evidence.ranks[0].events_of("network"):
        for name, group in event["groups"].items():
            groups[tuple(group)].append(name)
    if sliced := _sliced_by_hand(evidence):
        groups[tuple(range(evidence.count))] += sliced
    for group, names in groups.items():
        members = [rank for rank in group if rank < evidence.count]
        forwards = [
            [event for event in evidence.window(evidence.ranks[rank], "forward") if event["gradients"]]
            for rank in members
        ]
        if len(members) < 2 or any(not each for each in forwards) or _read_alike(evidence, members):
            continue
        first = forwards[0][0]
        if any(each[0]["inputs"] != first["inputs"] for each in forwards[1:]):
            shown = evidence.shown([names[0]])[0]
            module = shown.rpartition(".")[0] or shown
            ranks = " and ".join(map(str, members))
            return evidence.finding(
                "inputs_differ",
                f"Ranks {ranks} hold the shards of one tensor-parallel group ({module}) and were given different "
                "inputs, where the group computes one batch together: the sampler or loader counts all ranks as data "
                "parallel.",
                "Give all ranks of a tensor-parallel group the same batches: num_replicas and rank of the sampler are "
                "those of the data-parallel dimension of the mesh.",
                tensors=evidence.shown(names),
                ranks=tuple(members),
                site=_loader(evidence) or first["site"],
            )
    return None


def _sliced_by_hand(evidence: Evidence) -> list[str]:
    """The tensors of networks of which each rank holds another slice, so that all ranks are one group."""
    known = initial(evidence.union)
    return [
        name
        for name in sorted(evidence.sliced & set(known))
        if len({place.start for each in evidence.places for place in each.values() if place.name == name})
        == evidence.count
    ]


def _read_alike(evidence: Evidence, members: Sequence[int]) -> bool:
    """Whether the ranks have read the same batches, so that their inputs are parts which the script has made of them,
    as those of sequence parallelism are."""
    read = [
        [digest for event in evidence.window(evidence.ranks[rank], "batch") for digest in row_digests(event["rows"])]
        for rank in members
    ]
    return bool(read[0]) and all(each == read[0] for each in read[1:])


def _loader(evidence: Evidence) -> str:
    batches = evidence.window(evidence.ranks[0], "batch")
    return str(batches[0]["loader"]).partition(" ")[0] if batches else ""


def shards_scaled(evidence: Evidence) -> Finding | None:
    """Returns the finding that each rank has scaled the shards that it holds by a factor of its own."""
    factors = dict[int, set[float]]()
    for name in evidence.found.names:
        step = evidence.steps[0]
        placement = "" if step is None else step["placements"].get(name, "")
        if not placement.startswith("(Shard(dim=") or placement.count("Shard") > 1 or "Replicate" in placement:
            return None
        dimension = int(placement.removeprefix("(Shard(dim=").partition(")")[0])
        given, reference = evidence.gradients[0].get(name), evidence.reference.get(name)
        if given is None or reference is None:
            return None
        size = -(-reference.shape[dimension] // evidence.count)
        for rank in range(evidence.count):
            index = [slice(None)] * reference.ndim
            index[dimension] = slice(rank * size, (rank + 1) * size)
            part, whole = given[tuple(index)], reference[tuple(index)]
            if part.size and np.any(whole):
                if (factor := proportional(part, whole, evidence.bounds.relative)) is None:
                    return None
                factors.setdefault(rank, set()).add(evidence.rounded(factor))
    if len(factors) < 2 or any(len(each) > 1 for each in factors.values()):
        return None
    each = [next(iter(factors[rank])) for rank in sorted(factors)]
    if len(set(each)) == 1:
        return None
    listed = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in zip(sorted(factors), each, strict=True))
    return evidence.finding(
        "shards_scaled_apart",
        f"Each rank has scaled the shards that it holds by a factor of its own ({listed}, relative to one process): "
        "the gradients are clipped by the norm of a rank's shards and not by that of all.",
        "Clip with torch.nn.utils.clip_grad_norm_, which takes the norm of whole tensors, or sum the squares of all "
        "ranks before the root.",
        ranks=tuple(sorted(factors)),
        factor=each[0],
    )

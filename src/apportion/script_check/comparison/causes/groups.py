"""Tensors of pipelines and tensor-parallel groups that are wired otherwise than in one process."""

from __future__ import annotations

from collections import defaultdict

from apportion.script_check.comparison.evidence import Evidence
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
        listed = " and ".join(f"{own.partition('.')[2] or own} on rank {rank}" for rank, own in copies)
        return Finding(
            "tied_apart",
            "difference",
            f"{listed} are one parameter in one process (tied weights); here they are {len(copies)} tensors, each with "
            "only its own part of the gradient.",
            "Add the gradients of the copies over the ranks that hold them, after backward and before the step.",
            tuple(dict.fromkeys(own.partition(".")[2] or own for _, own in copies)),
            tuple(rank for rank, _ in copies),
            evidence.found.step,
            evidence.found.site,
        )
    return None


def _trained(evidence: Evidence, rank: int) -> set[str]:
    step = evidence.steps[rank]
    return set() if step is None else set(step["gradients"])


def inputs(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks of one tensor-parallel group were given different inputs."""
    groups = defaultdict[tuple[int, ...], list[str]](list)
    for event in evidence.ranks[0].of("network"):
        if any(kind.startswith("FSDP") for kind in event["modules"].values()):
            return None
        for name, group in event["groups"].items():
            groups[tuple(group)].append(name)
    for group, names in groups.items():
        members = [rank for rank in group if rank < evidence.count]
        forwards = [
            [event for event in evidence.window(evidence.ranks[rank], "forward") if event["gradients"]]
            for rank in members
        ]
        if len(members) < 2 or any(not each for each in forwards):
            continue
        first = forwards[0][0]
        if any(each[0]["inputs"] != first["inputs"] for each in forwards[1:]):
            module = evidence.shown([names[0]])[0].rpartition(".")[0]
            ranks = " and ".join(map(str, members))
            return Finding(
                "inputs_differ",
                "difference",
                f"Ranks {ranks} hold the shards of one tensor-parallel group (layer {module}) and were given different "
                "inputs, where the group computes one batch together: the sampler or loader counts all ranks as data "
                "parallel.",
                "Give all ranks of a tensor-parallel group the same batches: num_replicas and rank of the sampler are "
                "those of the data-parallel dimension of the mesh.",
                evidence.shown(names),
                tuple(members),
                evidence.found.step,
                _loader(evidence) or first["site"],
            )
    return None


def _loader(evidence: Evidence) -> str:
    batches = evidence.window(evidence.ranks[0], "batch")
    return str(batches[0]["loader"]).partition(" ")[0] if batches else ""

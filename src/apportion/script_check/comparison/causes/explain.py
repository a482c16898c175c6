"""The first family of causes that explains a difference."""

from __future__ import annotations

from apportion.script_check.comparison.causes import (
    averaging,
    clipping,
    groups,
    lists,
    micro_batches,
    state,
    statistics,
    weighting,
)
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import ranks_listed
from apportion.script_check.findings import Finding


def explained(evidence: Evidence) -> Finding:
    """Returns why the ranks and one process differ, or, where no family of causes explains it, where they do."""
    if evidence.found.what == "weights":
        return _weights(evidence)
    families = (
        groups.inputs,
        groups.tied,
        averaging.cause,
        weighting.scale,
        lists.cause,
        weighting.ranks_weighted,
        micro_batches.ranks_weighted_alike,
        clipping.cause,
        micro_batches.summed_again,
        groups.shards_scaled,
        statistics.cause,
        weighting.ranks_scaled_apart,
    )
    for family in families:
        if (finding := family(evidence)) is not None:
            return finding
    return _unexplained(evidence)


def _weights(evidence: Evidence) -> Finding:
    """The gradients agree, and the weights after the step do not."""
    found = evidence.found
    names = evidence.shown(found.names)
    ranks = tuple(sorted({difference.rank for difference in found.differences}))
    where = "all ranks" if len(ranks) == evidence.count else ranks_listed(ranks)
    if (repeated := state.repeated(evidence)) is not None:
        return repeated
    steps = [step for step in evidence.steps if step is not None]
    if len({tuple(step["rates"]) for step in steps}) > 1:
        why = ": the learning rates differ between the ranks"
        remedy = "Set the same learning rate on all ranks."
    elif _state_differs(evidence):
        why = ": the optimizer's state differs between the ranks"
        remedy = "Load or reset the optimizer's state on all ranks alike."
    elif any(step["placements"] for step in steps):
        why = ": the step depends on more than each element's own gradient, such as the norm of a rank's shard"
        remedy = "Use an optimizer whose step is the same for shards, or one that sums its norms over the ranks."
    else:
        why, remedy = "", "Look for what changes weights in the step otherwise on the ranks than in one process."
    sentence = (
        f"From step {found.shown} on, {len(names)} of {len(found.compared)} weights differ on {where} from those of "
        f"one process, {names[0]} first, though the gradients agree{why}."
    )
    return Finding("weights_differ", "difference", sentence, remedy, names, ranks, found.shown, found.site)


def _state_differs(evidence: Evidence) -> bool:
    states = [step["state"] for step in evidence.steps if step is not None]
    for name, first in (states[0] if states else {}).items():
        for other in states[1:]:
            if any(abs(other.get(name, {}).get(k, v) - v) > 1e-9 * abs(v) + 1e-15 for k, v in first.items()):
                return True
    return False


def _unexplained(evidence: Evidence) -> Finding:
    found = evidence.found
    names = evidence.shown(found.names)
    first = found.differences_of(found.names[0])[0]
    lost = "" if evidence.ranks_agree else " The ranks differ from each other, too."
    wanted = evidence.weights_in_reference
    if wanted.exact and wanted.left_out:
        lost += f" The gradient of one process contains nothing of the rows of {ranks_listed(wanted.left_out)}."
    cut = [event for event in evidence.window(evidence.ranks[0], "cut") if event["gradients"]]
    if cut and evidence.ranks_agree:
        return Finding(
            "gather_without_gradient",
            "difference",
            f"The gradient differs from that of one process (cosine {first.cosine:.6g}) although the ranks agree: the "
            f"{cut[0]['function']} at {cut[0]['site']} has no backward, and the gradient that should run through it is "
            "lost.",
            "Gather with torch.distributed.nn.functional.all_gather, which has a backward.",
            names,
            (),
            found.shown,
            cut[0]["site"],
        )
    sentence = (
        f"From step {found.shown} on, {len(names)} of {len(found.compared)} gradients differ from those of one "
        f"process, {names[0]} first (ratio {first.ratio:.6g}, cosine {first.cosine:.6g} on rank {first.rank}).{lost}"
    )
    remedy = "Compare what is done to these tensors on the ranks and in one process between backward and the step."
    return Finding("differs", "difference", sentence, remedy, names, (), found.shown, found.site, first.ratio)

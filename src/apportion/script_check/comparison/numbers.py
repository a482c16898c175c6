"""The findings from gradients, weights and their scales, and the first cause that explains a difference between the
ranks and the script as one process on the union of their rows.

Collectives that cut the gradient do so in the script as one process as well. A further pass of one process gives their
outputs the graph of their input. Where that changes the gradients, the loss depends on what was gathered, and the
script loses that part of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.script_check.comparison import accumulation, clipped, parameters, ranks_agree, rearrangement
from apportion.script_check.comparison.causes import averaging, groups, statistics, weighting
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.first_difference import first_difference
from apportion.script_check.comparison.rearrangement import Rearranged
from apportion.script_check.comparison.tensors import IN_FLOAT64, StepBounds, listed, ranks_listed, shown, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def explained(evidence: Evidence) -> Finding:
    """Returns why the ranks and one process differ, or, where no family of causes explains it, where they do."""
    if evidence.found.what == "weights":
        return _weights(evidence)
    families = (
        groups.inputs,
        groups.tied,
        averaging.cause,
        weighting.scale,
        averaging.different_lists,
        weighting.ranks_weighted,
        weighting.micro_batches_weighted_alike,
        weighting.clipped_elementwise,
        weighting.summed_again,
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
    if (repeated := _repeated_shards(evidence)) is not None:
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
    return evidence.finding("weights_differ", sentence, remedy, ranks=ranks)


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
        return evidence.finding(
            "gather_without_gradient",
            f"The gradient differs from that of one process (cosine {first.cosine:.6g}) although the ranks agree: the "
            f"{cut[0]['function']} at {cut[0]['site']} has no backward, and the gradient that should run through it is "
            "lost.",
            "Gather with torch.distributed.nn.functional.all_gather, which has a backward.",
            site=cut[0]["site"],
        )
    sentence = (
        f"From step {found.shown} on, {len(names)} of {len(found.compared)} gradients differ from those of one "
        f"process, {names[0]} first (ratio {first.ratio:.6g}, cosine {first.cosine:.6g} on rank {first.rank}).{lost}"
    )
    remedy = "Compare what is done to these tensors on the ranks and in one process between backward and the step."
    return evidence.finding("differs", sentence, remedy, factor=first.ratio)


def _repeated_shards(evidence: Evidence) -> Finding | None:
    """Returns the finding that all ranks hold the same numbers as their different shards of an optimizer's state, which
    a checkpoint with the shards of one rank leaves behind."""
    steps = [step for step in evidence.steps if step is not None]
    if len(steps) < 2:
        return None
    shards = [step.get("state_shards", {}) for step in steps]
    found = dict[str, list[str]]()
    for name, first in shards[0].items():
        if "Replicate" in steps[0]["placements"].get(name, ""):
            continue  # ranks of one row of the mesh hold the same shard
        for key, digest in first.items():
            if all(other.get(name, {}).get(key) == digest for other in shards[1:]):
                found.setdefault(name, []).append(key)
    if not found:
        return None
    names = evidence.shown(list(found))
    keys = listed(list(dict.fromkeys(key for each in found.values() for key in each)))
    position = steps[0]["step"]
    loads = [event for event in evidence.ranks[0].events_of("load") if event["step"] < position]
    return evidence.finding(
        "loaded_weights",
        f"Before step {evidence.found.shown} the ranks hold the same numbers as their different shards of the "
        f"optimizer's state of {listed(names)} ({keys}): what was loaded holds the shards of one rank.",
        "Save the whole state (get_optimizer_state_dict with full_state_dict) or the shards of all ranks "
        "(torch.distributed.checkpoint), and load each where it belongs.",
        tensors=names,
        site=str(loads[-1]["site"]) if loads else evidence.found.site,
    )


def cuts_gradient(union: RankRecord) -> bool:
    """Whether a pass that joins the graphs can show more: a collective had an input with a graph and none behind it."""
    return bool(union.events_of("cut"))


def cut_gradients(union: RankRecord, joined: RankRecord | None, bounds: StepBounds = None) -> list[Finding]:
    """Returns that a part of the gradient is lost. ``joined``: the record of the pass that joins the graphs."""
    if joined is None or not joined.steps:
        return []
    found, _ = first_difference([union], joined, bounds)
    if found is None or found.what != "gradients":
        return []
    first, cut = found.differences_of(found.names[0])[0], union.events_of("cut")[0]
    names = tuple(shown(name, found.compared) for name in found.names)
    sentence = (
        f"The {cut['function']} at {cut['site']} has no backward, and the loss depends on what it gathers: the "
        f"gradient through it is lost. With it, {len(names)} of {len(found.compared)} gradients differ (cosine "
        f"{first.cosine:.6g}), that of {names[0]} first."
    )
    remedy = (
        "Gather with torch.distributed.nn.functional.all_gather, which has a backward, or put the "
        "rank's own tensor "
        "in its place and scale the loss so that the average over the ranks is right."
    )
    return [
        Finding(
            "gather_without_gradient", "difference", sentence, remedy, names, (), found.shown, cut["site"], first.ratio
        )
    ]


def evidence_of(
    ranks: Sequence[RankRecord], union: RankRecord, split: RankRecord | None = None, bounds: StepBounds = None
) -> Evidence | None:
    """Returns what is known of the step at which the ranks and one process diverge, by more than ``bounds`` (see
    ``table.first_difference``); None where they do not."""
    found, _ = first_difference(ranks, union, bounds)
    if found is None:
        return None
    return Evidence(found, ranks, union, split, IN_FLOAT64 if bounds is None else bounds[found.optimizer, found.step])


def wants_split(ranks: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether a pass that splits the rows in each module can show why they differ."""
    evidence = evidence_of(ranks, union)
    return evidence is not None and explained(evidence).name == "differs" and statistics.suspected(evidence)


def findings_by_rank(ranks: Sequence[RankRecord], by_rank: RankRecord, bounds: StepBounds = None) -> list[Finding]:
    """Returns what else differs, beside modules that take statistics of each rank's rows. ``by_rank``: the record of
    one process whose modules do so, too. Only a cause that is known counts: what such modules do to rows that a script
    has rearranged may differ still."""
    evidence = evidence_of(ranks, by_rank, bounds=bounds)
    found = None if evidence is None else explained(evidence)
    return [] if found is None or found.name == "differs" else [found]


def _against_union(
    ranks: Sequence[RankRecord],
    union: RankRecord,
    split: RankRecord | None = None,
    until: int | None = None,
    bounds: StepBounds = None,
) -> list[Finding]:
    """Returns how the ranks' gradients and weights differ from those of one process, and why. ``split``: the record of
    the pass that splits rows, where there was one. ``until``: the step of all optimizers from which on a difference is
    explained already."""
    evidence = evidence_of(ranks, union, split, bounds)
    if evidence is None:
        return []
    step = step_of(union, evidence.found.optimizer, evidence.found.step)
    if until is not None and step is not None and step["step"] >= until:
        return []
    return [explained(evidence)]


@dataclass(frozen=True)
class Further:
    """The records of further passes of one process, where they were run. ``split``: rows are split in each module;
    ``joined``: the graphs of collectives are joined; ``by_rank``: modules that mix rows run on each rank's rows;
    ``rearranged``: the steps whose rows were distributed differently over their micro-batches.
    ``by_function``: the gradients of the user's function that ``function`` names.
    ``bounds``: what rounding may change in all of them."""

    split: RankRecord | None = None
    joined: RankRecord | None = None
    by_rank: RankRecord | None = None
    rearranged: Sequence[Rearranged] = ()
    by_function: RankRecord | None = None
    function: str = ""
    bounds: StepBounds = None

    @property
    def about(self) -> list[str]:
        """What the further passes were for, in sentences."""
        split = "A further pass split the rows in each module, to find those whose output for a row depends on others."
        joined = "A further pass gave the outputs of collectives the graph of their input."
        by_rank = "Compared also with one process whose layers take the statistics of each rank's rows alone."
        rearranged = (
            f"Compared also with one process in which the same rows are distributed differently over the micro-batches "
            f"of a step, at {len(self.rearranged)} steps."
        )
        steps = 0 if self.by_function is None else len(self.by_function.events_of("reference"))
        stated = (
            f"Compared also with {self.function}: the gradient of its loss over all rows of a step, at {steps} steps."
        )
        passes = (
            (steps, stated),
            (self.split, split),
            (self.joined, joined),
            (self.by_rank, by_rank),
            (self.rearranged, rearranged),
        )
        return [sentence for recorded, sentence in passes if recorded]


def findings(ranks: Sequence[RankRecord], union: RankRecord | None, further: Further = Further()) -> list[Finding]:
    """Returns what the ranks' numbers show, compared with each other and with one process. ``union``: the record of
    one process; None where the script does not run as one."""
    own = [*parameters.stale_optimizers(ranks), *parameters.loaded_weights(ranks)]
    if union is None:
        return [*own, *accumulation.findings(ranks[0])]
    whole = all(event["length"] == event["full"] for record in ranks for event in record.events_of("iteration"))
    if evidence_of(ranks, union) is not None:  # weights that are broadcast after a first forward agree
        own += parameters.findings(ranks, union)
    own += [*cut_gradients(union, further.joined, further.bounds), *accumulation.findings(union, whole)]
    # what begins or goes on with other weights, or leaves out a step, also has other gradients, and says nothing more
    first = [f for f in own if f.name in ("different_beginnings", "loaded_weights")] + ranks_agree.findings(ranks)
    until = min((finding.step for finding in first if finding.step is not None), default=None)
    compared = _against_union(ranks, union, further.split, until, further.bounds)
    if further.by_rank is not None and any(finding.name == "batch_statistics" for finding in compared):
        compared += findings_by_rank(ranks, further.by_rank, further.bounds)
    if further.by_function is not None:
        compared += clipped.against_function(ranks, union, further.by_function, further.function, further.bounds)
    if not own and not compared:
        own = clipped.findings(ranks, union)
    return [*own, *compared, *rearrangement.findings(ranks, further.rearranged, further.split)]

"""Gradients that are made of the ranks' own ones by other factors than those of one process: of whole ranks, as by
clipping with the norm of all gradients, of micro-batches, of single elements or of single tensors.

Where a step accumulates, no weights of whole ranks make up the gradient of one process: each micro-batch has others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from apportion.script_check.comparison import clipped
from apportion.script_check.comparison.combination import Combination, combination
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import Array, listed, ranks_listed, scale_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord


def scale(evidence: Evidence) -> Finding | None:
    """Returns the finding that gradients are a multiple of those of one process, the same on all ranks."""
    found = evidence.found
    factors = [difference.ratio for difference in found.differences]
    if not all(difference.scaled for difference in found.differences):
        return None
    if not evidence.near(max(factors), min(factors)) or any(
        len(found.differences_of(name)) != len(_holders(evidence, name))
        for name in found.names
        if name not in evidence.sliced
    ):
        return None
    factor, first = factors[0], evidence.ranks[0]
    names = evidence.shown(found.names)
    # a bias before a normalisation has no gradient but rounding
    floor = evidence.bounds.relative * scale_of({**evidence.reference})
    compared = [n for n in found.compared if n in evidence.reference and np.linalg.norm(evidence.reference[n]) > floor]
    if set(compared) <= set(found.names):
        intro = f"Every gradient is {factor:.10g} times that of one process"
    else:
        intro = f"{listed(names)}: the gradient is {factor:.10g} times that of one process, the others agree"
    alone, own = (clipped.factor(each, found.optimizer, found.step) for each in (evidence.union, first))
    if alone and own and not evidence.near(alone, own):
        factor *= alone / own
        intro += f", and {factor:.10g} times before they are clipped"
    because, remedy = _reason_and_remedy(evidence, factor, own or 1.0, alone or 1.0)
    site = _site(evidence)
    return evidence.finding("scale", f"{intro}{because}.", remedy, site=site, factor=factor)


def _holders(evidence: Evidence, name: str) -> list[int]:
    return [rank for rank, gradients in enumerate(evidence.gradients) if name in gradients]


def _reason_and_remedy(evidence: Evidence, factor: float, of_ranks: float, of_union: float) -> tuple[str, str]:
    """Why gradients are ``factor`` times those of one process before both are clipped by ``of_ranks`` and ``of_union``,
    and what to change."""
    count = evidence.count
    given, wanted = evidence.weights_of_ranks, evidence.weights_in_reference
    averaged = given.exact and given.alike and evidence.near(given.factors[0] / of_ranks, 1 / count, 1e-7)
    if evidence.near(factor, 1 / count):
        if averaged and (_losses(evidence.union) == "sum" or not _divided(evidence)):
            return (
                f" (1/{count}): the loss is a sum over rows, and the gradients of {count} ranks are averaged; "
                f"Adam hides "
                "this, clipping, eps and weight decay do not",
                f"Multiply the loss by the number of ranks ({count}), or take a mean over the rows of all ranks.",
            )
        return (
            f" (1/{count}): they are divided by the number of ranks twice",
            f"Divide by the number of ranks once: a wrapper that averages has already divided by {count}.",
        )
    if evidence.near(factor, count):
        how = " (set_gradient_divide_factor)" if evidence.is_sharded else ""
        return (
            f" (the number of ranks): the ranks' gradients are summed and not averaged{how}, and the loss is "
            f"a mean over "
            "each rank's rows; Adam hides this, clipping, eps and weight decay do not",
            f"Divide the summed gradients by the number of ranks ({count}), or the loss by the rows of all ranks.",
        )
    batches = _batches(evidence)
    if batches > 1 and evidence.near(factor, batches):
        return (
            f" (the number of micro-batches of a step is {batches}): the accumulated gradient is not divided by it",
            "Divide each micro-batch's loss by the number of micro-batches.",
        )
    if batches > 1 and evidence.near(factor, 1 / batches):
        return (
            f" (the number of micro-batches of a step is {batches}): it is divided by it twice",
            "Divide by the number of micro-batches once.",
        )
    if given.exact and wanted.exact and given.alike and wanted.alike:
        return (
            f": the ranks' own gradients are summed by the factor {given.factors[0] / of_ranks:.6g}, in one process by "
            f"{wanted.factors[0] / of_union:.6g}",
            "Scale the loss or the sum over the ranks so that both factors agree.",
        )
    return "", "Look for what scales the loss or the gradient between backward and the step by this factor."


def _losses(record: RankRecord) -> str:
    kinds = {event["reduction"] for event in record.events_of("criterion") if isinstance(event["reduction"], str)}
    return kinds.pop() if len(kinds) == 1 else ""


def _divided(evidence: Evidence) -> bool:
    """Whether the ranks divide their loss by their number and one process does not."""
    ranks, union = _share(evidence.ranks[0]), _share(evidence.union)
    return bool(ranks and union and evidence.near(union / ranks, evidence.count, 1e-6))


def _share(record: RankRecord) -> float | None:
    """The value on which backward was first called over that of the last loss function before."""
    value: float | None = None
    for event in record.events_of("criterion", "backward"):
        if event["kind"] == "criterion":
            value = event["value"]
        elif value and event["value"] is not None:
            return float(event["value"] / value)
    return None


def _batches(evidence: Evidence) -> int:
    return len(evidence.window(evidence.ranks[0], "batch"))


def _site(evidence: Evidence) -> str:
    backward = evidence.window(evidence.ranks[0], "criterion", "backward")
    return backward[0]["site"] if backward else evidence.found.site


def ranks_weighted(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks' gradients are weighted otherwise than in one process, where their sum by
    other factors is the gradient of one process to the last digit."""
    given, wanted = evidence.weights_of_ranks, evidence.weights_in_reference
    if not given.exact or not wanted.exact or not evidence.ranks_agree or wanted.left_out:
        return None  # one process that leaves out the rows of a rank has chosen rows, and weighted nothing
    found = evidence.found
    if given.left_out:
        return _left_out(evidence, given.left_out)
    clips = evidence.window(evidence.ranks[0], "clip")
    enlarged = max(_times(given)) > 1 + max(1e-7, evidence.bounds.relative)  # which no clipping does
    if wanted.alike and not given.alike and (clips or not enlarged):
        lower = min(range(evidence.count), key=lambda rank: given.factors[rank])
        sentence = (
            f"The ranks' own gradients were scaled before they were averaged, by {_per_rank(_times(given))}, each rank "
            "by its own norm: clipping comes before the average."
        )
        remedy = "Clip after the gradients are averaged over the ranks, so that all ranks clip by the same norm."
        site = clips[0]["site"] if clips else found.site
        return evidence.finding(
            "clipped_before_average",
            sentence,
            remedy,
            ranks=(lower,),
            site=site,
            factor=given.factors[lower] * evidence.count,
        )
    if given.alike and not wanted.alike:
        counts = _counts(evidence, wanted)
        sentence = (
            "The ranks are weighted alike, though each rank's loss is a mean over a count of its own: in one process "
            f"their weights are {_per_rank(_relative(wanted))}{counts}."
        )
        remedy = (
            "Divide each rank's summed loss by the count (rows, tokens) of all ranks, and multiply by the number of "
            "ranks where the wrapper averages."
        )
        return evidence.finding(
            "ranks_weighted_alike", sentence, remedy, site=_site(evidence), factor=wanted.factors[0] / given.factors[0]
        )
    if not all(map(evidence.near, given.factors, wanted.factors, [1e-7] * evidence.count)):
        sentence = (
            f"The ranks' own gradients are weighted by {_per_rank(given.factors)}, in one process by "
            f"{_per_rank(wanted.factors)}."
        )
        return evidence.finding(
            "ranks_weighted",
            sentence,
            "Weight each rank's loss by its share of the rows of all ranks.",
            site=_site(evidence),
        )
    return None


def _left_out(evidence: Evidence, ranks: Sequence[int]) -> Finding:
    """No rank's step has the gradients of some ranks, as where those of one rank are broadcast."""
    return evidence.finding(
        "not_averaged",
        f"All ranks step with the same gradients, in which those of the rows of {ranks_listed(ranks)} are left out.",
        "Average the gradients of all ranks: an all_reduce after backward, divided by the number of ranks. A broadcast "
        "of one rank's gradients leaves out the others.",
        ranks=tuple(ranks),
    )


def _relative(weights: Combination) -> tuple[float, ...]:
    """The factors over their mean."""
    mean = sum(weights.factors) / len(weights.factors)
    return tuple(factor / mean for factor in weights.factors)


def _times(weights: Combination) -> tuple[float, ...]:
    """The factors over those of an average."""
    return tuple(factor * len(weights.factors) for factor in weights.factors)


def _per_rank(factors: Sequence[float]) -> str:
    parts = [f"{factor:.6g} on rank {rank}" for rank, factor in enumerate(factors)]
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _counts(evidence: Evidence, wanted: Combination) -> str:
    """The numbers of targets or rows that explain the factors of one process."""
    losses = [evidence.window(record, "criterion") for record in evidence.ranks]
    return _explaining_counts(wanted.factors, losses, max(1e-6, wanted.rounding))


def _explaining_counts(weights: Sequence[float], losses: Sequence[Sequence[Event]], rounding: float) -> str:
    """The numbers of targets, or else of rows, to which the weights of the ranks are proportional, in brackets; empty
    where they are to neither. ``losses``: the calls of loss functions of each rank."""
    for field, what in (("counted", "targets"), ("rows", "rows")):
        counts = [sum(event.get(field) or 0 for event in each) for each in losses]
        if all(counts) and np.allclose(np.array(weights) / np.array(counts), weights[0] / counts[0], rounding):
            return f" ({', '.join(map(str, counts[:-1]))} and {counts[-1]} {what})"
    return ""


def ranks_scaled_apart(evidence: Evidence) -> Finding | None:
    """Returns the finding that tensors which should be the same on all ranks are scaled by another factor on each."""
    found = evidence.found
    ratios = dict[int, set[float]]()
    for difference in found.differences:
        if not difference.scaled:
            return None
        ratios.setdefault(difference.rank, set()).add(evidence.rounded(difference.ratio))
    if len(ratios) == evidence.count and len({tuple(sorted(each)) for each in ratios.values()}) == 1:
        return None
    if len(ratios) > 1 and all(len(each) == 1 for each in ratios.values()):
        return _each_by_its_own(evidence, {rank: each.pop() for rank, each in ratios.items()})
    rank = max(ratios, key=lambda each: len(found.differences) if each in ratios else 0)
    factor = next(difference.ratio for difference in found.differences if difference.rank == rank)
    names = evidence.shown(found.names)
    others = [each for each in range(evidence.count) if each != rank]
    sentence = (
        f"{listed(names)}: the gradient on rank {rank} is {factor:.6g} times that of one process and of "
        f"{ranks_listed(others)}, before step {found.shown}: what scales the gradients, such as clipping, leaves these "
        "tensors out on some ranks."
    )
    remedy = "Scale the gradients of all parameters by the same factor on every rank, replicated ones too."
    return evidence.finding("scaled_apart", sentence, remedy, ranks=(rank,), factor=factor)


def _each_by_its_own(evidence: Evidence, factors: Mapping[int, float]) -> Finding:
    """Several ranks scale the gradients by another factor than one process, each by its own."""
    found = evidence.found
    names = evidence.shown(found.names)
    times = " and ".join(f"{factor:.6g} times on rank {rank}" for rank, factor in sorted(factors.items()))
    sentence = (
        f"{listed(names)}: the gradient before step {found.shown} is that of one process {times}: each rank scales the "
        "gradients by a factor of its own, such as by the norm of the tensors and shards that it holds, in place of "
        "the norm of those of all ranks."
    )
    remedy = (
        "Sum the squared norms of the shards over the ranks, count what is replicated once, and clip by the same norm "
        "on every rank."
    )
    clips = evidence.window(evidence.ranks[0], "clip")
    site = clips[-1]["site"] if clips else found.site
    rank = min(factors)
    return evidence.finding(
        "scaled_apart", sentence, remedy, ranks=tuple(sorted(factors)), site=site, factor=factors[rank]
    )


_CLIP_REMEDY = "Clip after the gradients are averaged over the ranks, so that all ranks clip the same gradients."
_ATTAINED = 3
"""The elements that lie at a limit where it is one: fewer may be so by chance, as a loss of signs gives equal ones."""


def clipped_elementwise(evidence: Evidence) -> Finding | None:
    """Returns the finding that clipping comes before the average; None where it does not explain the gradients."""
    if not evidence.ranks_agree or not all(evidence.own_gradients):
        return None
    given = evidence.weights_of_ranks
    if given.exact:
        limit = _attained(evidence) if given.alike else None  # a hook clips as backward runs, before it is recorded
        return None if limit is None else _by_value(evidence, limit)
    for limit in _limits(evidence):
        clipped = [{name: np.clip(a, -limit, limit) for name, a in own.items()} for own in evidence.own_gradients]
        made = combination(_recorded(evidence, evidence.gradients[0]), clipped)
        if made.exact and made.alike:
            return _by_value(evidence, limit)
    return _by_tensor(evidence)


def _limits(evidence: Evidence) -> Iterator[float]:
    """The values by which elements may have been clipped: those of the calls, and the largest of one process."""
    for event in evidence.window(evidence.ranks[0], "clip"):
        if event["function"] == "clip_grad_value_":
            yield event["limit"]
    if evidence.reference:
        yield max(float(np.abs(array).max(initial=0.0)) for array in evidence.reference.values())


def _attained(evidence: Evidence) -> float | None:
    """The value that the largest elements of each rank's own gradients and of one process's all have."""
    largest = [_largest(arrays) for arrays in (*evidence.own_gradients, evidence.reference)]
    limit = largest[0][0]
    alike = all(count >= _ATTAINED and abs(value - limit) <= 1e-12 * limit for value, count in largest)
    return limit if alike and not evidence.weights_in_reference.exact else None


def _largest(arrays: Mapping[str, Array]) -> tuple[float, int]:
    """The largest absolute value of all elements, and the number of those that have it."""
    flat = np.abs(np.concatenate([array.ravel() for array in arrays.values()] or [np.zeros(1)]))
    value = float(flat.max(initial=0.0))
    return value, int((flat >= value * (1 - 1e-12)).sum()) if value else 0


def _recorded(evidence: Evidence, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of which each rank's own gradient is known."""
    return {
        n: a for n, a in arrays.items() if all(n in own and own[n].shape == a.shape for own in evidence.own_gradients)
    }


def _by_value(evidence: Evidence, limit: float) -> Finding:
    return _clipping_finding(
        evidence,
        f"The elements of each rank's own gradients were clipped to at most {limit:.6g} before they were averaged; one "
        "process clips those of all rows: clipping comes before the average.",
    )


def _by_tensor(evidence: Evidence) -> Finding | None:
    """Each tensor of each rank is scaled by a factor of its own, where one process weights the ranks alike."""
    apart = dict[str, Combination]()
    for name, array in _recorded(evidence, evidence.gradients[0]).items():
        parts = [{name: own[name]} for own in evidence.own_gradients]
        given = combination({name: array}, parts)
        wanted = combination({name: evidence.reference[name]}, parts) if name in evidence.reference else given
        if not (given.determined and wanted.determined):
            continue  # one element, say, is a sum of the ranks' in many ways
        if not (given.exact and wanted.exact and wanted.alike):
            return None
        if max(given.factors) * evidence.count > 1 + 1e-7:  # no clipping enlarges
            return None
        if not given.alike:
            apart[name] = given
    if not apart:
        return None
    first, made = next(iter(apart.items()))
    times = [factor * evidence.count for factor in made.factors]
    scaled = ", ".join(f"{factor:.6g} on rank {rank}" for rank, factor in enumerate(times))
    return _clipping_finding(
        evidence,
        f"Each tensor of each rank's own gradients was scaled by its own norm before the average, such as "
        f"{evidence.shown([first])[0]} by {scaled}: clipping comes before the average.",
    )


def _clipping_finding(evidence: Evidence, sentence: str) -> Finding:
    found = evidence.found
    clips = evidence.window(evidence.ranks[0], "clip")
    site = clips[0]["site"] if clips else found.site
    return evidence.finding("clipped_before_average", sentence, _CLIP_REMEDY, site=site)


_Weights = list[list[float]]
"""The weight of each rank's part, by micro-batch and then by rank."""


def micro_batches_weighted_alike(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks' parts of each micro-batch are averaged with equal weights, and in one process
    with unequal ones; each micro-batch as a whole has the same weight in both."""
    if not differs_by_micro_batch(evidence):
        return None
    weights = _relative_by_micro_batch(evidence)
    at = max(range(len(weights)), key=lambda number: max(weights[number]) - min(weights[number]))
    shown = " and ".join(f"{weight:.6g} on rank {rank}" for rank, weight in enumerate(weights[at]))
    backward = evidence.window(evidence.ranks[0], "criterion", "backward")
    return evidence.finding(
        "ranks_weighted_alike",
        "The ranks are weighted alike, though each rank's loss is a mean over a count of its own: in one process "
        f"their weights in micro-batch {at + 1} of {len(weights)} of a step are {shown}"
        f"{_micro_batch_counts(evidence, weights, at)}.",
        "Divide each rank's summed loss by the count (rows, tokens) of all ranks, best of all micro-batches of the "
        "step, and multiply by the number of ranks where the wrapper averages.",
        site=backward[0]["site"] if backward else evidence.found.site,
        factor=weights[at][0],
    )


def summed_again(evidence: Evidence) -> Finding | None:
    """Returns the finding that the ranks sum what is already accumulated again with each micro-batch, so that the first
    ones have the greatest weights."""
    parts = _added_by_backward(evidence)
    count = len(parts) // evidence.count
    if count < 2 or not evidence.ranks_agree:
        return None
    known = {name for name in parts[0] if all(name in part for part in parts)}
    given = combination({n: a for n, a in evidence.gradients[0].items() if n in known}, parts)
    wanted = combination({n: a for n, a in evidence.reference.items() if n in known}, parts)
    if not (given.exact and wanted.exact and wanted.alike) or given.left_out:
        return None
    factors = np.array(given.factors).reshape(evidence.count, count)
    if not np.allclose(factors, factors[0], rtol=1e-6) or np.allclose(factors, factors[0, 0], rtol=1e-6):
        return None
    relative = factors[0] / factors[0, -1]
    found = evidence.found
    sums = [event["site"] for event in evidence.window(evidence.ranks[0], "collective") if event.get("site")]
    return evidence.finding(
        "micro_batches_unequal",
        f"The {count} micro-batches that a step accumulates are weighted differently on the ranks, relative to the "
        f"last one by {', '.join(f'{each:.6g}' for each in relative)}: what is already accumulated is summed over the "
        "ranks again with each of them.",
        "Sum the gradients over the ranks once for each step, after its last micro-batch.",
        site=sums[0] if sums else found.site,
        factor=float(relative[0]),
    )


def differs_by_micro_batch(evidence: Evidence) -> bool:
    """Whether such weights explain the difference to the last digit."""
    if not evidence.ranks_agree or not evidence.micro_batches:
        return False
    given, wanted = evidence.micro_batches_of_ranks, evidence.micro_batches_in_reference
    if not given.exact or not wanted.exact or not given.alike or wanted.left_out or min(wanted.factors) <= 0:
        return False
    totals = np.reshape(wanted.factors, (evidence.count, -1)).sum(0)
    return bool(np.allclose(totals, totals[0], rtol=1e-6)) and not wanted.alike


def _relative_by_micro_batch(evidence: Evidence) -> _Weights:
    """The weights in one process over their mean."""
    weights = np.reshape(evidence.micro_batches_in_reference.factors, (evidence.count, -1))
    return [list(map(float, column / column.mean())) for column in weights.T]


def _micro_batch_counts(evidence: Evidence, weights: _Weights, at: int) -> str:
    """The numbers of targets or rows that explain the weights of one micro-batch."""
    losses = [evidence.window(record, "criterion") for record in evidence.ranks]
    if any(len(each) != len(weights) for each in losses):
        return ""
    return _explaining_counts(weights[at], [each[at : at + 1] for each in losses], 1e-6)


def _added_by_backward(evidence: Evidence) -> list[dict[str, Array]]:
    """What each backward of each rank adds, rank by rank; empty where the ranks call backward unequally often."""
    found = list[dict[str, Array]]()
    sizes = set[int]()
    for rank, record in enumerate(evidence.ranks):
        for event in record.events_of("contributions"):
            if event["optimizer"] == evidence.found.optimizer and event["number"] == evidence.found.step:
                own = {evidence.names[rank].get(name, name): each for name, each in event["own"].items() if each}
                sizes |= {len(each) for each in own.values()}
                found += [
                    {name: each[at] for name, each in own.items() if at < len(each)}
                    for at in range(max(map(len, own.values()), default=0))
                ]
    return found if len(sizes) == 1 and len(found) == evidence.count * sizes.pop() else []

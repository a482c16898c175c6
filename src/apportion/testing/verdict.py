"""Compares what the ranks and one process have recorded, finds what differs first, and says it: the verdict, a
table of what differs, the cause and the remedy."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from apportion.script_check.comparison.first_difference import FirstDifference, first_difference
from apportion.script_check.comparison.tensors import Array, TensorDifference, difference, initial, scale_of, shown
from apportion.script_check.record import Event, RankRecord


class DifferentNetwork(AssertionError):
    """The ranks do not train the network that one process trains. ``disagreement``: what differs first, and why."""

    __module__ = "apportion.testing"  # as users import it, and tracebacks print it

    def __init__(self, message: str, disagreement: Disagreement) -> None:
        super().__init__(message)
        self.disagreement = disagreement

    def __reduce__(self) -> tuple[type[DifferentNetwork], tuple[str, Disagreement]]:
        return type(self), (str(self), self.disagreement)


@dataclass(frozen=True)
class Disagreement:
    """The first thing that differs. ``sentence``: what it is; ``differences``: tensor by tensor and rank by rank, from
    one process or, before the first step, from rank 0; ``step``: the optimizer step, counted from 1, or None."""

    sentence: str
    cause: Explanation
    differences: tuple[TensorDifference, ...] = ()
    step: int | None = None
    notes: tuple[str, ...] = ()
    verdict: str = "Another network"


_SEED_REMEDY = (
    "Broadcast rank 0's weights before the first step, or seed all ranks alike where the model is made. A model given "
    "as a module has the same weights on all ranks; one given as a function is made on each rank, with generators that "
    "are seeded differently."
)
_STALE_REMEDY = "The optimizer holds other parameters than the model: make it after the model is wrapped or sharded."


def disagreement(
    ranks: Sequence[RankRecord], union: RankRecord, shares: tuple[float, ...], buffers: bool = True
) -> Disagreement | None:
    """Returns the first thing that differs between the ranks and one process; None where nothing does. ``shares``: of
    each rank, its part of a batch's rows."""
    for look in (_beginning, _counts, _nothing_moves):
        if (found := look(ranks, union)) is not None:
            return found
    parted, _ = first_difference(ranks, union)
    if parted is not None:
        return _parted(parted, ranks, union, shares)
    found = _rates(ranks, union)
    return found if found is not None or not buffers else _buffers(ranks, union)


def _beginning(ranks: Sequence[RankRecord], union: RankRecord) -> Disagreement | None:
    first = initial(ranks[0])
    scale = scale_of(first)
    found = list[TensorDifference]()
    for record in ranks[1:]:
        for name, array in initial(record).items():
            if name in first and array.shape == first[name].shape:
                differs = difference(shown(name, list(first)), record.rank, array, first[name], scale)
                found += [differs] if differs is not None else []
    if not found:
        return None
    names = list(dict.fromkeys(each.name for each in found))
    cause = Explanation(
        "initial weights",
        f"The ranks begin with different weights: {len(names)} of {len(first)} tensors differ, {names[0]} first.",
        _SEED_REMEDY,
    )
    return Disagreement("before the first step, weights of the ranks differ from those of rank 0", cause, tuple(found))


def _counts(ranks: Sequence[RankRecord], union: RankRecord) -> Disagreement | None:
    calls = [[call["made"] for call in record.events_of("call")] for record in [union, *ranks]]
    for number, made in enumerate(zip(*calls, strict=True), 1):
        if len(set(made)) > 1:
            by_rank = ", ".join(f"rank {rank} made {steps}" for rank, steps in enumerate(made[1:]))
            return Disagreement(
                f"in call {number} of step, the number of optimizer steps differs",
                Explanation(
                    "number of steps",
                    f"In call {number} one process made {made[0]} optimizer steps, {by_rank}.",
                    "Decide on all ranks alike whether an optimizer step is made, by a value that is reduced over the "
                    "ranks: a loss that is not finite, an end of data or a condition on a rank's own rows is not the "
                    "same on each.",
                ),
                step=number,
            )
    return None


def _nothing_moves(ranks: Sequence[RankRecord], union: RankRecord) -> Disagreement | None:
    """What a comparison does not show, as one process makes the same mistake: steps that change no parameter."""
    for record in (*ranks, union):
        steps = record.steps
        before = initial(record)
        moving = any(rate for step in steps for rate in step["rates"]) or not any(step["rates"] for step in steps)
        weights: Mapping[str, Array] = steps[-1]["weights"] if steps else {}
        same = [name for name in weights if name in before and before[name].shape == weights[name].shape]
        if moving and same and all(np.array_equal(before[name], weights[name]) for name in same):
            where = "in one process" if record is union else f"on rank {record.rank}"
            return Disagreement(
                f"no parameter of the model changes in {len(steps)} optimizer steps {where}",
                Explanation("not updated", "The optimizer steps change none of the model's parameters.", _STALE_REMEDY),
                verdict="Nothing is trained",
            )
    return None


def _parted(
    parted: FirstDifference, ranks: Sequence[RankRecord], union: RankRecord, shares: tuple[float, ...]
) -> Disagreement:
    compared = parted.compared
    named = tuple(
        TensorDifference(shown(each.name, compared), each.rank, each.relative, each.ratio, each.cosine)
        for each in parted.differences
    )
    where = f", at {parted.site}" if parted.site else ""
    sentence = f"from optimizer step {parted.step} on, {parted.what} differ from those of one process{where}"
    seen = Circumstances(parted.what, len(ranks), len(compared), shares, _statistics(ranks[0]))
    cause = explained(named, seen) if parted.what == "gradients" else _update(parted, ranks, union, named, seen)
    return Disagreement(sentence, cause, named, parted.step, tuple(_notes(parted.step, ranks, union)))


def _update(
    parted: FirstDifference,
    ranks: Sequence[RankRecord],
    union: RankRecord,
    named: tuple[TensorDifference, ...],
    seen: Circumstances,
) -> Explanation:
    """The cause where gradients agree and the weights after the step do not."""
    if (rates := _rates(ranks, union)) is not None and rates.step is not None and rates.step <= parted.step:
        return rates.cause
    if parted.step == 1 and (still := _unmoved(parted, ranks)):
        return Explanation(
            "not updated",
            f"The gradients agree, and {still} of {seen.compared} parameters do not change on the ranks, as they do in "
            "one process.",
            _STALE_REMEDY,
        )
    names = list(dict.fromkeys(each.name for each in named))
    return Explanation(
        "update",
        f"The gradients agree, and the updates of {len(names)} of {seen.compared} parameters differ, {names[0]} first.",
        "Look at the optimizer: its state, parameter groups and weight decay on each rank, a norm or a mean that it "
        "takes over one rank's shard, and weights that are changed outside of it.",
    )


def _unmoved(parted: FirstDifference, ranks: Sequence[RankRecord]) -> int:
    before = initial(ranks[0])
    weights: Mapping[str, Array] = ranks[0].steps[0]["weights"]
    return sum(
        name in before and before[name].shape == array.shape and np.array_equal(before[name], array)
        for name, array in weights.items()
        if name in parted.names
    )


def _statistics(record: RankRecord) -> tuple[str, ...]:
    modules: Mapping[str, str] = {k: v for event in record.events_of("network") for k, v in event["modules"].items()}
    return tuple(
        f"{name.partition('.')[2] or name} ({kind})"
        for name, kind in modules.items()
        if "BatchNorm" in kind and "Sync" not in kind
    )


def _notes(step: int, ranks: Sequence[RankRecord], union: RankRecord) -> Iterator[str]:
    calls = [record.events_of("call") for record in [union, *ranks]]
    if all(calls) and any(call["drew"] for call in calls[0]):
        drew = sorted({name for call in calls[0] for name in call["drew"]})
        yield (
            f"The step draws random numbers ({', '.join(drew)}), which differ between the ranks and one process: have "
            "them among the rows."
        )
    one_step_each = all(call["made"] == 1 for each in calls for call in each)
    if one_step_each and all(each[step - 1]["loss"] is not None for each in calls):
        losses = [each[step - 1]["loss"] for each in calls]
        yield f"Losses of step {step}: {', '.join(f'{loss:.6g}' for loss in losses[1:])}; one process: {losses[0]:.6g}."


def _rates(ranks: Sequence[RankRecord], union: RankRecord) -> Disagreement | None:
    for number, steps in enumerate(zip(*(record.steps for record in [union, *ranks]), strict=False), 1):
        for rank, step in enumerate(steps[1:]):
            if step["rates"] != steps[0]["rates"]:
                return Disagreement(
                    f"at optimizer step {number}, learning rates differ from those of one process",
                    Explanation(
                        "learning rates",
                        f"The learning rate at step {number} is {_rate(step)} on rank {rank} and {_rate(steps[0])} in "
                        "one process.",
                        "Advance the schedule once for each optimizer step on each rank, and have nothing in it depend "
                        "on the rank or the world size.",
                    ),
                    step=number,
                )
    return None


def _rate(step: Event) -> str:
    return ", ".join(f"{rate:.6g}" for rate in step["rates"])


def _buffers(ranks: Sequence[RankRecord], union: RankRecord) -> Disagreement | None:
    for number, steps in enumerate(zip(*(record.steps for record in [union, *ranks]), strict=False), 1):
        reference: Mapping[str, Array] = steps[0]["buffers"]
        scale = scale_of(reference)
        found = [
            differs
            for rank, step in enumerate(steps[1:])
            for name, array in step["buffers"].items()
            if name in reference
            and (differs := difference(shown(name, list(reference)), rank, array, reference[name], scale)) is not None
        ]
        if found:
            names = list(dict.fromkeys(each.name for each in found))
            cause = Explanation(
                "buffers",
                f"The weights agree, and {len(names)} of {len(reference)} buffers do not, {names[0]} first.",
                "Compute buffers from the rows of all ranks, or broadcast them after the step. Where each rank is to "
                "have its own, give buffers=False.",
            )
            return Disagreement(
                f"from optimizer step {number} on, buffers differ from those of one process",
                cause,
                tuple(found),
                number,
            )
    return None


ROWS = 12
"""The most rows of a table; what differs beyond them is counted."""
WIDTH = 100


def message(found: Disagreement, ranks: int) -> str:
    """Returns what is printed of a disagreement of ``ranks`` ranks."""
    verdict = _paragraph(f"{found.verdict} on {ranks} ranks", f"{found.sentence}.")
    shown = [table(found.differences, ranks)] if found.differences else []
    reasons = [_paragraph("Cause", found.cause.sentence), _paragraph("Remedy", found.cause.remedy)]
    reasons += [_paragraph("Note", note) for note in found.notes]
    return "\n\n".join([verdict, *shown, "\n".join(reasons)])


def table(differences: Sequence[TensorDifference], ranks: int) -> str:
    """Returns the table of differences, one row for each tensor and rank, or each tensor where all ranks are alike."""
    lines = [("tensor", "rank", "ratio", "cosine", "relative difference")]
    names = list(dict.fromkeys(each.name for each in differences))
    for name in names:
        own = [each for each in differences if each.name == name]
        figures = [(f"{each.ratio:.7g}", f"{each.cosine:.6f}", f"{each.relative:.2e}") for each in own]
        if len(own) == ranks and len(set(figures)) == 1:
            lines.append((name, "all", *figures[0]))
        else:
            lines += [(name, str(each.rank), *figure) for each, figure in zip(own, figures, strict=True)]
    widths = [max(len(line[column]) for line in lines[: ROWS + 1]) for column in range(5)]
    shown = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    left = len(shown) - ROWS - 1
    rest = [f"  and {left} more row{'s' if left > 1 else ''}"] if left > 0 else []
    return "\n".join(line.rstrip() for line in [*shown[: ROWS + 1], *rest])


def _paragraph(title: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH, break_on_hyphens=False, initial_indent=f"{title}: ", subsequent_indent="  ")
    return "\n".join(lines)


# The likely cause of a difference between ranks and one process, from ratios and cosines alone, and its remedy.


ALIKE = 1e-7
"""How far two ratios may be apart that rounding and the way of a sum explain."""


@dataclass(frozen=True)
class Explanation:
    """A class of mistake. ``name``: a short word for it; ``sentence``: what was observed; ``remedy``: what to
    change."""

    name: str
    sentence: str
    remedy: str


@dataclass(frozen=True)
class Circumstances:
    """What is known beside the differences. ``what``: gradients or weights. ``ranks``: how many there are.
    ``compared``: the number of tensors compared. ``shares``: of each rank, its part of a batch's rows. ``statistics``:
    the layers that take statistics over a rank's rows."""

    what: str
    ranks: int
    compared: int
    shares: tuple[float, ...] = ()
    statistics: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Tensor:
    """One tensor's differences by rank; a rank without any has the reference's values."""

    name: str
    by_rank: tuple[TensorDifference | None, ...] = field(default=())

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(1.0 if each is None else each.ratio for each in self.by_rank)

    @property
    def scaled(self) -> bool:
        """Whether each rank's tensor is a multiple of the reference, zero among them."""
        return all(each is None or each.scaled or _is_zero(each) for each in self.by_rank)

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same tensor, as far as ratio, cosine and distance show."""
        first = self.by_rank[0]
        return first is not None and all(
            each is not None
            and _near(each.ratio, first.ratio)
            and _near(each.cosine, first.cosine)
            and _near(each.relative, first.relative)
            for each in self.by_rank
        )

    def weighted(self, shares: Sequence[float]) -> float:
        return sum(share * ratio for share, ratio in zip(shares, self.ratios, strict=True))


def explained(differences: Sequence[TensorDifference], seen: Circumstances) -> Explanation:
    """Returns the likely cause of gradients that differ at one step, by which the ranks may be distinguished."""
    tensors = _by_tensor(differences, seen.ranks)
    if any(math.isnan(ratio) for tensor in tensors for ratio in tensor.ratios):
        return _shapes(tensors, seen)
    if all(tensor.alike for tensor in tensors):
        ratios = [tensor.ratios[0] for tensor in tensors]
        if all(tensor.scaled for tensor in tensors) and max(ratios) - min(ratios) <= ALIKE:
            return _scale(tensors, seen)
        return _mixed(tensors, seen)
    return _differs_by_rank([tensor for tensor in tensors if not tensor.alike], seen)


def _by_tensor(differences: Sequence[TensorDifference], ranks: int) -> list[_Tensor]:
    names = dict.fromkeys(each.name for each in differences)
    found = {(each.name, each.rank): each for each in differences}
    return [_Tensor(name, tuple(found.get((name, rank)) for rank in range(ranks))) for name in names]


def _scope(tensors: Sequence[_Tensor], seen: Circumstances) -> str:
    singular = seen.what.removesuffix("s")
    if len(tensors) == seen.compared:
        return f"Every {singular}"
    if len(tensors) == 1:
        return f"The {singular} of {tensors[0].name}"
    return f"The {singular} of each of {len(tensors)} of {seen.compared} tensors ({_names(tensors)})"


def _names(tensors: Sequence[_Tensor]) -> str:
    names = [tensor.name for tensor in tensors]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _scale(tensors: Sequence[_Tensor], seen: Circumstances) -> Explanation:
    ratio, ranks = tensors[0].ratios[0], seen.ranks
    sentence = f"{_scope(tensors, seen)} is {ratio:.7g} times that of one process, on all ranks."
    if _near(ratio, 1 / ranks):
        return Explanation(
            "divided",
            f"{sentence} This is 1/{ranks}, one over the number of ranks.",
            "The sum over the ranks is divided once too often. Use a loss that is a mean over the rows where gradients "
            "are averaged over the ranks (DistributedDataParallel, fully_shard, a division by the world size); with a "
            "loss that is a sum, add the gradients up and do not divide.",
        )
    if _near(ratio, ranks):
        return Explanation(
            "not divided",
            f"{sentence} This is the number of ranks.",
            "The gradients are added up over the ranks and not divided. Divide by the world size where the loss is a "
            "mean over a rank's rows (dist.ReduceOp.AVG with NCCL, or divide after the all-reduce), and keep the "
            "divide factor of fully_shard. Where the step accumulates this number of micro-batches, divide the loss of "
            "each by it.",
        )
    if ratio == 0:
        return Explanation(
            "no gradient",
            f"{_scope(tensors, seen)} is zero on all ranks, and not in one process.",
            "The graph from the loss to the parameter is cut on several ranks: a collective without gradient "
            "(use torch.distributed.nn.functional), detach(), or a gradient that is set to None before the step.",
        )
    return Explanation(
        "scale",
        sentence,
        "Look for a factor that depends on the number of ranks or micro-batches: a division by accumulation steps, by "
        "the world size or by a count of tokens.",
    )


def _differs_by_rank(tensors: Sequence[_Tensor], seen: Circumstances) -> Explanation:
    shares = seen.shares or (1 / seen.ranks,) * seen.ranks
    all_differ = len(tensors) == seen.compared
    scope = _scope(tensors, seen)
    if all(_near(tensor.weighted(shares), 1) for tensor in tensors):
        sentence = f"{scope} differs between the ranks, and their mean is that of one process: it is not averaged."
        if all_differ:
            return Explanation(
                "not averaged",
                sentence,
                "Every rank trains on its own rows alone. Call the forward of the wrapped model, and not that of "
                "model.module; make the backward pass outside of no_sync(); give the wrapper or the all-reduce a group "
                "that has all ranks.",
            )
        return Explanation(
            "tensors not averaged",
            sentence,
            "Have these parameters averaged too: they are outside of the wrapped module, were replaced or unfrozen "
            "after it was wrapped, are ignored by it, or are left out of the hand-written all-reduce.",
        )
    if all(_near(sum(tensor.ratios), 1) for tensor in tensors):
        return Explanation(
            "partial sums",
            f"{scope} differs between the ranks, and their sum is that of one process: the ranks hold partial sums.",
            "Add the gradients of these parameters up over the ranks, as those of replicated parameters of a "
            "tensor-parallel or sequence-parallel layer need it.",
        )
    if all(tensor.scaled for tensor in tensors):
        ratios = ", ".join(f"{ratio:.6g}" for ratio in tensors[0].ratios)
        return Explanation(
            "scaled by rank",
            f"{scope} points the same way on all ranks and has another length on each ({tensors[0].name}: {ratios}).",
            "A factor is computed by each rank alone: clip by a norm over all shards and ranks, and use the same "
            "learning rate and loss scale on all ranks.",
        )
    return Explanation(
        "differs by rank",
        f"{scope} differs between the ranks.",
        "Each rank uses something of its own here: gradients that are not averaged and are scaled as well, weights "
        "that differ, lists of parameters in another order in the all-reduce, or rows that differ between the ranks of "
        "a tensor-parallel group (shared=True gives all ranks the same rows).",
    )


def _mixed(tensors: Sequence[_Tensor], seen: Circumstances) -> Explanation:
    scope = _scope(tensors, seen)
    sentence = f"{scope} is the same on all ranks, and is not that of one process (cosine {_worst(tensors):.4f})."
    if seen.statistics:
        return Explanation(
            "batch statistics",
            f"{sentence} {', '.join(seen.statistics[:3])} normalises over the rows of one rank.",
            "Use torch.nn.SyncBatchNorm.convert_sync_batchnorm, or a normalisation without batch statistics. Where "
            "statistics of one rank's rows are intended, give reference=, which computes the parts one by one.",
        )
    if len(set(seen.shares)) > 1:
        return Explanation(
            "weights of ranks",
            f"{sentence} The ranks have parts of unequal size ({', '.join(f'{share:.3g}' for share in seen.shares)} of "
            "the rows).",
            "The means of the ranks are given equal weight. Weight each by its rows: divide the sum of a rank's losses "
            "by the rows of all ranks, times the world size where gradients are averaged.",
        )
    if len(tensors) < seen.compared:
        return Explanation(
            "tensors mixed",
            sentence,
            "Look at how these parameters are reduced: another list or order of parameters on each rank, a gradient "
            "that a collective in the forward pass does not return, or a tied parameter with two copies.",
        )
    return Explanation(
        "weights of ranks or statistics",
        sentence,
        "The loss is not a mean over the rows of all ranks. The ranks' means are over different numbers of tokens "
        "(divide by the count of all ranks), the loss or a layer uses statistics of one rank's rows (a contrastive "
        "loss, whitening), gradients are clipped before they are averaged, or not all micro-batches are in the "
        "gradient.",
    )


def _shapes(tensors: Sequence[_Tensor], seen: Circumstances) -> Explanation:
    unlike = [tensor for tensor in tensors if any(math.isnan(ratio) for ratio in tensor.ratios)]
    return Explanation(
        "shapes",
        f"{_names(unlike)} {'has' if len(unlike) == 1 else 'have'} another shape on the ranks than in one process.",
        "A rank's part of a tensor is compared where it is a DTensor (fully_shard, parallelize_module), and not where "
        "it is an ordinary tensor with a part of the values: use DTensor, or have the step gather its parts.",
    )


def _worst(tensors: Sequence[_Tensor]) -> float:
    return min((each.cosine for tensor in tensors for each in tensor.by_rank if each is not None), default=1.0)


def _is_zero(each: TensorDifference) -> bool:
    return each.ratio == 0 and _near(each.relative, 1)


def _near(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= ALIKE * max(abs(a), abs(b), 1)

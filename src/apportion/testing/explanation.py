"""The likely cause of a difference between ranks and one process, from ratios and cosines alone, and its remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from apportion.script_check.comparison.tensors import TensorDifference

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

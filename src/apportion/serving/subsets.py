"""What an answer without some of the members costs: the accuracy of every subset of an ensemble. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from apportion.serving.aggregation import Aggregation, Array, combined

MOST_SUBSETS = 500
"""Of one size: of more, so many that are spread over all of them."""


@dataclass(frozen=True)
class Size:
    """All subsets of so many members."""

    members: int
    subsets: int
    least: float
    mean: float
    most: float
    """Accuracies, 0 to 1."""


@dataclass(frozen=True)
class Statement:
    """Accuracies, 0 to 1, on so many examples."""

    examples: int
    whole: float
    """With all members."""
    alone: Mapping[str, float]
    """Each member by itself."""
    without: Mapping[str, float]
    """All but that one; nothing where there is but one."""
    sizes: tuple[Size, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people, in percent."""
        said = [f"{self.examples:,} examples", f"{'all members':<24}{self.whole:8.2%}"]
        said += [f"{f'{name} alone':<24}{share:8.2%}" for name, share in self.alone.items()]
        said += [f"{f'without {n}':<24}{s:8.2%}  {100 * (s - self.whole):+.2f} points" for n, s in self.without.items()]
        for size in self.sizes:
            name = f"any {size.members} of {len(self.alone)}"
            said.append(f"{name:<24}{size.mean:8.2%}  from {size.least:.2%} to {size.most:.2%}")
        return said


def statement(
    outputs: Mapping[str, Array], targets: Array, how: Aggregation, weights: Mapping[str, float] | None = None
) -> Statement:
    """``outputs``: of each member, [examples, classes], or labels [examples]. ``targets``: [examples], of integers."""
    names = list(outputs)

    def share(some: Sequence[str]) -> float:
        own = None if weights is None else [weights[name] for name in some]
        return accuracy(combined(how, [outputs[name] for name in some], own), targets)

    sizes = []
    for many in range(1, len(names)):
        stride = -(-comb(len(names), many) // MOST_SUBSETS)
        found = [share(some) for at, some in enumerate(combinations(names, many)) if at % stride == 0]
        sizes.append(Size(many, len(found), min(found), sum(found) / len(found), max(found)))
    return Statement(
        examples=len(targets),
        whole=share(names),
        alone={name: share([name]) for name in names},
        without={n: share([other for other in names if other != n]) for n in names} if len(names) > 1 else {},
        sizes=tuple(sizes),
    )


def accuracy(outputs: Array, targets: Array) -> float:
    """The share of examples whose largest score, or label, is the target."""
    labels = outputs.argmax(-1) if outputs.ndim > 1 else outputs
    if labels.shape != targets.shape:
        raise ValueError(
            f"outputs {list(outputs.shape)} are no scores of {list(targets.shape)} targets: accuracy is for nets that "
            "give one row of scores, or one label, an example"
        )
    return float(np.mean(labels == targets))

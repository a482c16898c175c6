"""The division of a chain of layers: into stages of the same length, into stages with replicas, by choices a layer.

All three are dynamic programming over the layers in order: what is best up to a layer does not depend on what follows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

SECONDS_PER_BYTE = 1 / 2e9
"""The seconds for each byte that goes from stage to stage, by which a cut is judged before anything is measured: a copy
into shared memory and one out of it, there and back."""
SECONDS_PER_MESSAGE = 1e-4

ROOM = 0.05
"""The share by which the longest stage may be longer than its lower bound in the first search for a division."""

_Found = tuple[float, float, tuple[int, ...]]
"""A division found so far: (longest stage, sent in all, first calls of the stages)."""


def balanced(seconds: Sequence[float], crossing: Sequence[float | None], stages: int) -> list[int]:
    """The calls that the stages after the first begin with: the longest stage is as short as can be, what it sends and
    receives included; of ways that are equally long, one that sends least in all.

    ``seconds``: of each call; ``crossing``: seconds to send what would go over a cut before it, None where there can be
    none. ValueError where there are more stages than places to cut at.
    """
    return list(_balanced(tuple(seconds), tuple(crossing), stages))


@lru_cache(maxsize=256)  # a plan asks for the same cuts again: of every schedule, and on links of every bandwidth
def _balanced(seconds: tuple[float, ...], crossing: tuple[float | None, ...], stages: int) -> tuple[int, ...]:
    cuts = _Cuts(seconds, crossing, stages)
    over = ROOM * cuts.least
    while (found := cuts.within(min(cuts.least + over, cuts.most))) is None:
        over = 4 * over or cuts.most
    longest, _, _ = found
    found = cuts.within(longest, longest)  # the stages before the longest need not be as short as can be
    assert found is not None, "there is the one that was found"
    return found[2][1:]


class _Cuts:
    """The ways to divide a chain into this many stages of which none takes longer than a limit.

    There are few: a stage ends where those before it can have come to within the limit, and those after it can still
    go on from. Whatever is left out is slower than the limit, so the best of what is left is the best of all.
    """

    def __init__(self, seconds: Sequence[float], crossing: Sequence[float | None], stages: int) -> None:
        n = len(seconds)
        self._stages = stages
        self._at = [0, *(i for i in range(1, n) if crossing[i] is not None), n]
        most = len(self._at) - 1
        if most < stages:
            raise ValueError(
                "layer_placement and pipeline_parallel cut a network between its layers: the network can be cut into "
                f"{most} stage{'s' if most > 1 else ''} at most, and there are {stages} workers: use "
                f"{f'workers<={most}, or ' if most > 1 else ''}data_parallel"
            )
        upto = [0.0, *accumulate(seconds)]
        self._upto = [upto[i] for i in self._at]
        self._cross = [*(crossing[i] or 0.0 for i in self._at[:-1]), 0.0]

    @property
    def least(self) -> float:
        """A lower bound of the longest stage: that of stages of equal length, cut where little is sent, or the longest
        piece that cannot be cut."""
        sent = 2 * (self._stages - 1) * min(self._cross[1:-1], default=0.0)
        return max((self._upto[-1] + sent) / self._stages, *(b - a for a, b in pairwise(self._upto)))

    @property
    def most(self) -> float:
        """An upper bound of the longest stage, whatever the rounding."""
        return (self._upto[-1] + 2 * max(self._cross)) * (1 + 1e-9)

    def within(self, limit: float, enough: float = 0.0) -> _Found | None:
        """The best division with no stage longer than ``limit``; None where each has a longer stage. A stage need not
        be shorter than is ``enough``."""
        best: dict[int, _Found] = {0: (0.0, 0.0, ())}
        last, room = len(self._at) - 1, limit * (1 + 1e-9)  # what is left out is so for certain, rounding or not
        for stage in range(1, self._stages + 1):
            left = self._stages - stage
            first = bisect_left(self._upto, self._upto[last] - left * room)
            beyond = bisect_right(self._upto, stage * room)
            ends = range(max(stage, first), min(beyond, last - left + 1))
            best = {end: found for end in ends if (found := self._last_stage(best, end, limit, enough)) is not None}
        return best.get(last)

    def _last_stage(self, best: Mapping[int, _Found], end: int, limit: float, enough: float) -> _Found | None:
        """The best division up to ``end``, by its last stage; tried from short stages to those that are too long by
        themselves."""
        found: _Found | None = None
        upto, cross = self._upto[end], self._cross[end]
        for begin in range(end - 1, -1, -1):
            own = upto - self._upto[begin]
            if own > limit:
                break
            before = best.get(begin)
            if before is None:
                continue
            sent = before[1] + cross
            longest = max(enough, before[0], own + self._cross[begin] + cross)
            if longest <= limit and (found is None or (longest, sent) <= found[:2]):
                found, limit = (longest, sent, (*before[2], self._at[begin])), longest
        return found


@dataclass(frozen=True)
class LayerWork:
    """The work of one layer for one batch, in seconds and bytes."""

    forward: float
    backward: float
    parameter_bytes: float
    crossing_bytes: float
    """The bytes that would go over a cut before the layer, in one direction."""


class PartitionStage(NamedTuple):
    """A stage of consecutive layers, each batch computed by one of the replicas."""

    first: int
    last: int
    replicas: int


def replicated(layers: Sequence[LayerWork], workers: int, bandwidth: float) -> tuple[tuple[PartitionStage, ...], float]:
    """Stages with replicas for a full pipeline of batches, and the seconds that each batch takes of the slowest one.

    The recurrence of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    section 3.1: the best pipeline of m workers up to a layer is the best one of fewer workers up to an earlier layer
    and one more stage of the others. ``bandwidth``: bytes a second of each worker's port, each way.

    What a stage of m replicas takes a batch differs from the paper's ``max(sum T, 2 (m - 1) |w| / B) / m`` in two ways:

    - A ring passes ``2 (m - 1) / m |w|`` through each port. The paper's ``2 (m - 1) |w|`` is what all ports together
      carry: right where they share one link, and 16 times too much where each has its own.
    - Gradients travel while the backward pass goes on, not during the forward pass, which needs the weights that they
      change: ``(forward + max(backward, ring)) / m``.

    ``2 a / B`` of activations and their gradients are shared by the ports of a stage's replicas: each counts on both
    sides of the cut, so that the side with fewer replicas decides.

    No plan asks for this: ``pipeline_parallel`` has one rank a stage, and its replicas are of whole pipelines. It holds
    the model against what PipeDream has published (``benchmarks/lib/pipedream.py``).
    """
    n = len(layers)
    sums = _Sums(layers)
    best: list[list[tuple[float, tuple[PartitionStage, ...]] | None]] = [[(0.0, ())] + [None] * workers]
    best += [[None] * (workers + 1) for _ in range(n)]
    for end in range(1, n + 1):
        for used in range(1, workers + 1):
            best[end][used] = _one_more(sums, best, end, used, bandwidth)
    found = min((b for b in best[n][1:] if b is not None), key=lambda b: b[0])
    return found[1], found[0]


def _one_more(
    sums: _Sums,
    best: Sequence[Sequence[tuple[float, tuple[PartitionStage, ...]] | None]],
    end: int,
    used: int,
    bandwidth: float,
) -> tuple[float, tuple[PartitionStage, ...]] | None:
    found: tuple[float, tuple[PartitionStage, ...]] | None = None
    for replicas in range(used, 0, -1):
        for begin in range(end - 1, -1, -1):
            if found is not None and sums.computing(begin, end) / replicas >= found[0]:
                break
            before = best[begin][used - replicas]
            if before is None or (found is not None and before[0] >= found[0]):
                continue
            slowest = max(before[0], sums.stage(begin, end, replicas, bandwidth))
            if found is None or slowest < found[0]:
                found = slowest, (*before[1], PartitionStage(begin, end - 1, replicas))
    return found


class _Sums:
    """The sums of seconds and bytes over any consecutive layers."""

    def __init__(self, layers: Sequence[LayerWork]) -> None:
        self._forward = [0.0, *accumulate(layer.forward for layer in layers)]
        self._backward = [0.0, *accumulate(layer.backward for layer in layers)]
        self._weights = [0.0, *accumulate(layer.parameter_bytes for layer in layers)]
        self._crossing = [0.0, *(layer.crossing_bytes for layer in layers[1:]), 0.0]

    def computing(self, begin: int, end: int) -> float:
        return self._forward[end] - self._forward[begin] + self._backward[end] - self._backward[begin]

    def stage(self, begin: int, end: int, replicas: int, bandwidth: float) -> float:
        """The seconds of a stage with this many replicas, for each batch that passes."""
        ring = 2 * (replicas - 1) / replicas * (self._weights[end] - self._weights[begin]) / bandwidth
        backward = max(self._backward[end] - self._backward[begin], ring)
        sent = 2 * max(self._crossing[begin], self._crossing[end]) / bandwidth
        return max(self._forward[end] - self._forward[begin] + backward, sent) / replicas


def chain(costs: Sequence[Sequence[float]], change: Callable[[int, int, int], float]) -> tuple[float, list[int]]:
    """The cheapest choice for each layer of a chain, and its price: each layer's own, and what it costs to change.

    ``costs[i][a]``: the price of layer i done in way a; ``change(i, a, b)``: the price of changing before layer i from
    way a to way b (``inf``: that cannot be). The first of equally cheap choices is taken.
    """
    ways = range(len(costs[0]))
    total = list(costs[0])
    came: list[list[int]] = []
    for i, own in enumerate(costs[1:], 1):
        ends = list(total)
        reached = [[ends[a] + change(i, a, b) for a in ways] for b in ways]
        come = [min(ways, key=each.__getitem__) for each in reached]
        total = [each[a] + seconds for each, a, seconds in zip(reached, come, own, strict=True)]
        came.append(come)
    choices = [min(ways, key=lambda a: total[a])]
    for come in reversed(came):
        choices.append(come[choices[-1]])
    return min(total), choices[::-1]

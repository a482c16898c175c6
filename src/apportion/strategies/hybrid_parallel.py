"""hybrid_parallel: convolutions data parallel, fully connected layers sliced.

Paper: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014. Convolutions have 95 % of
the computation and 5 % of the weights, large activations; fully connected layers the other way round.

::

                 convolutions           exchange         fully connected
    rank 0   rows 0..B/2, all weights \\             / all B rows, half of the units \\
                                        activations                                   sums, as tensor_parallel
    rank 1   rows B/2..B, all weights /             \\ all B rows, half of the units /

``exchange="all"`` (the paper's scheme a): every rank gets all ranks' activations at once, and computes the fully
connected layers on the whole batch. ``exchange="rotate"`` (scheme b): on one rank's rows after the other; the next ones
are under way meanwhile, and activations are there for one share at a time.

Exact: the gradients of the convolutions are summed over ranks, batch normalisation there takes its statistics over all
of them; the fully connected layers see every row.

Price: ``t = t_conv(B / n) + 2 bytes(conv weights) / bandwidth + t_fc(B) / n + B * features * 4 bytes / bandwidth`` and
tensor_parallel's sums.

Wins where a network is what the paper is about: many more weights after the convolutions than in them, as in AlexNet
and VGG. Loses to data_parallel where the convolutions have most of the weights (ResNets), and to threads on one host.

A worker's death loses nothing on one host: every worker keeps its part in memory that outlives it, and the others and
its replacement go on from the last update. Elsewhere the run ends, and resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, fx, nn

from apportion.comm.world import World
from apportion.core.data.batch import rows_of
from apportion.core.data.source import BatchSource
from apportion.core.loss_terms import examples
from apportion.core.modes import evaluating
from apportion.core.strategy import State, Step, Strategy
from apportion.core.torch_private import BatchNormBase, ConvBase
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.constraints import must_feed, no_convolution
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.tensor import first_sliced_layer, hybrid_cost, sliced
from apportion.parallel.batch_coupling.analysis import whole_batch_functions
from apportion.parallel.optim.fused import with_fused_updates
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.replica.step import reference
from apportion.parallel.tensor.hybrid_model import (
    HybridModel,
    HybridParts,
    cut,
    takes_channels_last,
    unfollowed,
    what_crosses,
)
from apportion.parallel.tensor.patterns import trace
from apportion.parallel.tensor.sharding_plan import ShardingPlan, plan
from apportion.parallel.tracing.forward_signature import opened

_SLICED = (nn.Linear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
_CONVOLUTIONS = tuple(f"{kind}{n}d" for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3))
_SLICED_KINDS = ("Linear", "Embedding", "MultiheadAttention", "LSTM", "GRU", "RNN")


@final
@dataclass(frozen=True, repr=False)
class HybridParallel(Strategy):
    """Each worker computes a share of the examples in the first layers, and a slice of the last ones."""

    exact = True
    splits = True
    survives = True

    data: str | None = None
    """The name under which the data parallel layers are, as ``features``; None: whatever comes before the others."""
    tensor: str | None = None
    """The name under which the sliced layers are, as ``classifier``; None: what comes after ``data``, or after the last
    convolution."""
    exchange: Literal["all", "rotate"] = "all"
    """The exchange of the activations between the first and the last layers: all ranks' at once, or one rank's after
    the other."""
    min_width: int = 32
    """A Linear or an embedding that is not part of a pair is sliced where both its sides are at least this wide, as
    with tensor_parallel."""

    def __post_init__(self) -> None:
        if self.exchange not in ("all", "rotate"):
            raise ValueError(f'exchange={self.exchange!r} must be "all" or "rotate"')
        self._must_be_whole("min_width")

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        """Yields the strategy with the names as they are found by themselves, and sliced from a later layer on, where
        that is cheaper."""
        usual = cls()._begins(profile)
        if layout.ranks == 1 or usual is None:
            return
        yield cls()
        how = sliced(profile, min_width=cls.min_width, among=profile.layers[usual:])
        at = first_sliced_layer(profile, layout, how, least=usual)
        later = [i for i, layer in enumerate(profile.layers) if at is not None and i >= at and layer.name in how]
        if later and later[0] > usual:
            yield cls(tensor=_prefix(profile, later[0]))

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        must_feed(profile, layout.ranks)
        self._refuse(profile.own_update, profile.carries, not profile.cut_by_rows)
        if self._by_convolutions and not any(layer.kind in _CONVOLUTIONS for layer in profile.layers):
            raise ValueError(no_convolution(profile.name))
        if profile.untraceable is not None:
            raise ValueError(_no_graph(profile.untraceable))
        at = self._begins(profile)
        if at is None:
            what = "convolution" if self.data is None else f"layer under {self.data!r}"
            raise ValueError(_no_layer(profile.name, what))
        back = profile.layers[at:]
        among = [layer for layer in back if self.tensor is None or _under(layer.name, [self.tensor])]
        how = sliced(profile, min_width=self.min_width, among=among)
        if not how:
            raise ValueError(f"no layer under {back[0].name} can be sliced: use data_parallel")
        return hybrid_cost(profile, layout, at, how, rotates=self.exchange == "rotate")

    @property
    def _by_convolutions(self) -> bool:
        """True where the network's convolutions say where it is cut, and no name does."""
        return self.data is None and self.tensor is None

    def _begins(self, profile: Profile) -> int | None:
        """Returns the number of the first layer that is sliced; None: there is none."""
        layers = list(enumerate(profile.layers))
        if self.tensor is not None:
            return next((i for i, layer in layers if _under(layer.name, [self.tensor])), None)
        if self.data is None:
            first = [i for i, layer in layers if layer.kind in _CONVOLUTIONS]
        else:
            first = [i for i, layer in layers if _under(layer.name, [self.data])]
        after = [i for i, layer in layers if layer.kind in _SLICED_KINDS and i > max(first, default=len(layers))]
        return after[0] if after else None

    def _refuse(self, own_update: bool, carries: bool, couples: bool) -> None:
        for given, why in (
            (own_update, "update= calls the network as it likes, and here its parts are called: use"),
            (carries, "carry= gives every row a state, and rows do not stay with a rank here: use"),
        ):
            if given:
                raise ValueError(f"{why} data_parallel")
        if self.exchange == "rotate" and couples:
            raise ValueError('exchange="rotate" would cut the batch under a loss that couples examples: use "all"')

    @property
    def divides_batches(self) -> bool:  # type: ignore[override]
        return self.exchange == "rotate"

    def build(self, workload: Workload, world: World) -> Step:
        workload.must_feed(world.size)
        self._refuse(workload.update is not None, workload.carry is not None, workload.count is None)

        def part(world: World) -> MakePart:
            return lambda model, inputs: self._part(workload, world, model, inputs)

        def look(model: nn.Module, source: BatchSource) -> None:
            """Refuses what ties rows together where the ranks' rows come one after the other: the last layers and the
            loss see parts of the batch."""
            if self.exchange == "rotate" and world.size > 1:
                whole_batch_functions(model, workload, source.sample, strategy=str(self))

        return SplitStep(with_fused_updates(workload), world, part(world), again=part, look=look)

    def _part(self, workload: Workload, world: World, model: nn.Module, inputs: Any) -> HybridModel:
        if self._by_convolutions and not any(isinstance(layer, ConvBase) for layer in model.modules()):
            raise ValueError(no_convolution(type(model).__name__))
        traced = [
            part for part in trace(model, inputs if opened(model, inputs) else None) if not part.name and part.pure
        ]
        if not traced:
            raise ValueError(_no_graph(unfollowed(model, inputs)))
        back = self._sliced_names(model, traced[0].graphs[0])
        trains, evaluates = (cut(model, g, lambda name: _under(name, back)) for g in traced[0].graphs)
        self._check(model, trains, evaluates, back)
        with evaluating(model.modules()):
            crossing = what_crosses(evaluates, inputs)
        if crossing is not None:
            raise ValueError(
                f"{crossing} goes into {back[0]}, and only rows of examples can be exchanged: use data_parallel"
            )
        found = ShardingPlan()
        for width in (self.min_width, 1):
            if not found.layers():
                found = plan(model, inputs, workload, min_width=width, within=back)
        if not found.layers():
            raise ValueError(f"no layer under {', '.join(back)} can be sliced: use data_parallel")
        last = takes_channels_last(model, (trains.front, evaluates.front), inputs)
        rotates = self.exchange == "rotate"
        functions = self._functions(workload, world, trains.front, inputs) if world.size > 1 else []
        made = HybridModel(
            model, found, world.group(), workload,
            trains=trains, evaluates=evaluates, rotates=rotates, channels_last=last,
        )  # fmt: skip
        made.use_whole_functions(functions)
        return made

    def _functions(self, workload: Workload, world: World, front: nn.Module, inputs: Any) -> list[str]:
        """Returns the modules of the first layers that take batch statistics by a function; what else ties rows
        together there is refused. The last layers see all rows."""

        def rows(many: int) -> tuple[Any, Any]:
            few = rows_of(inputs, slice(0, many))
            return few, few

        alone = replace(workload, loss=_squares, count=examples)
        return whole_batch_functions(front, alone, rows, strategy="hybrid_parallel", again=world.under_way)

    def _sliced_names(self, model: nn.Module, graph: fx.Graph) -> list[str]:
        """Returns names, each of a layer or of what many are under."""
        for field in ("data", "tensor"):
            name = getattr(self, field)
            if name is not None and name not in dict(model.named_modules()):
                known = ", ".join(child for child, _ in model.named_children())
                raise ValueError(f"{field}={name!r} must be a layer of {type(model).__name__}, which has {known}")
        if self.tensor is not None:
            return [self.tensor]
        calls = [
            (str(node.target), model.get_submodule(str(node.target)))
            for node in graph.nodes
            if node.op == "call_module"
        ]
        first = [i for i, (name, m) in enumerate(calls) if self._is_data(name, m)]
        after = [name for name, m in calls[max(first, default=0) :] if isinstance(m, _SLICED)]
        if not first or not after:
            what = "convolution" if self.data is None else f"layer under {self.data!r}"
            raise ValueError(_no_layer(type(model).__name__, what))
        return list(dict.fromkeys(after))

    def _is_data(self, name: str, layer: nn.Module) -> bool:
        return isinstance(layer, ConvBase) if self.data is None else _under(name, [self.data])

    def _check(self, model: nn.Module, trains: HybridParts, evaluates: HybridParts, back: Sequence[str]) -> None:
        names = {p: name for name, p in model.named_parameters()}
        for parts in (trains, evaluates):
            if not any(_under(name, back) for name in parts.back_calls):
                raise ValueError(f"tensor={back[0]!r} is called nowhere: name what is")
            late = sorted(n for n in parts.back_calls if self._is_data(n, model.get_submodule(n)))
            if late:
                raise ValueError(
                    f"{late[0]} comes after {back[0]}, and a batch is put together only once: use data_parallel"
                )
            both = sorted(names[p] for p in parts.front_uses & parts.back_uses)
            if both:
                raise ValueError(
                    f"{both[0]} is used before and after the exchange: use data_parallel or tensor_parallel"
                )
        if self.exchange == "rotate":
            norms = sorted(n for n in trains.back_calls if isinstance(model.get_submodule(n), BatchNormBase))
            if norms:
                raise ValueError(
                    f'exchange="rotate" would give {norms[0]} the statistics of a part of the batch: use exchange="all"'
                )

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _squares(outputs: Any, targets: Any) -> Tensor:
    """Returns a number that every output of every row moves: a mean over rows."""
    return torch.stack([t.square().flatten(1).sum(1).mean() for t in outputs if t.is_floating_point()]).sum()


def _under(name: str, prefixes: Sequence[str]) -> bool:
    return any(not prefix or name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _prefix(profile: Profile, at: int) -> str:
    """Returns the shortest name that no layer before this one is under."""
    parts = profile.layers[at].name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next(n for n in names if not any(_under(layer.name, [n]) for layer in profile.layers[:at]))


def _no_graph(why: str) -> str:
    return (
        f"{why}; so hybrid_parallel cannot cut the network in two: let the forward do the same for every batch, and "
        "nothing but compute its outputs, or use data_parallel or tensor_parallel"
    )


def _no_layer(network: str, what: str) -> str:
    return (
        f"{network} calls no layer that can be sliced after a {what}: say which with tensor=, or use data_parallel or "
        "tensor_parallel"
    )

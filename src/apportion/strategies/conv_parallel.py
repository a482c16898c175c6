"""conv_parallel: every image, or its channels, divided among the ranks; each computes its part of every layer.

Papers: Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", IPDPS 2019
(height and width); Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012 (two
towers of channels); Hewett and Grady, "A Linear Algebraic Approach to Model Parallelism in Deep Learning", 2020 (the
halo exchange and its adjoint).

::

    split="height"   rank 0  [ rows 0..H/2  ] conv [ . . . ] conv [ . . ] pool \\
                                  | halo |          | halo |                    sum -> linear, loss: alike on each rank
                     rank 1  [ rows H/2..H  ] conv [ . . . ] conv [ . . ] pool /
    "channel"        filters divided, then what they look at divided, in turn: one sum every two convolutions
    "group"          filters divided; a grouped convolution, whose groups the ranks share, needs nothing of the others

Every rank has the whole batch. A rank computes those rows of each layer's output whose middle it has, and gets the few
rows that it needs besides from its neighbours, while it computes the rest. Batch normalisation takes its statistics
over all of the image. Where the image becomes a vector, each rank keeps those columns of the first Linear that look at
its part, and the outputs are added up; what follows is computed alike.

Exact. What a layer, or a line of ``forward``, would need of other ranks is computed from whole numbers before anything
runs; what is not known to be right on a part of an image is refused by name.

Price, height: ``t = t_compute / n + sum over convolutions of 2 (latency + (k - 1) * B * C * W * bytes / bandwidth)``
and the sum of the weights' gradients, ``2 * bytes(weights) / bandwidth``; each rank holds all weights, and 1/n of the
activations. Width: the same with the window's width, and H for W. Channel: ``t = t_compute / n + 4 sum over every
second convolution of B * C * H * W * bytes / bandwidth``, 1/n of the weights, and of every second activation. Group:
``2 sum`` over the convolutions that follow another and have no groups; 1/n of the weights and of the activations.

Wins where the images are large and the batch is small: one image, of which a single rank could not hold the
activations. Loses where the batch can be divided instead (data_parallel sends only the weights' gradient, once a step),
and where images shrink to few rows a rank.

A worker's death loses the step under way: a replacement gets the state after the last update, and all go on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import chance, held, times
from apportion.cost_model.constraints import nothing_to_divide
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies import spatial
from apportion.parallel.partition.part import MakePart, ReplicatedPart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.replica.step import reference
from apportion.parallel.spatial.forward import cut_network

SPLITS = ("height", "width", "channel", "group")


@final
@dataclass(frozen=True, repr=False)
class ConvParallel(Strategy):
    """Each worker computes a part of every image, or of its channels."""

    exact = True
    divides_batches = False
    splits = True
    survives = True

    split: Literal["height", "width", "channel", "group"] = "height"
    """The thing that is divided: rows, columns, channels, or the groups of grouped convolutions."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r} must be one of {', '.join(map(repr, SPLITS))}")

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        """Yields rows of images that are high enough to be shared out; channels where the filters are many."""
        if layout.ranks == 1:
            return
        found = spatial.images(profile, "height")
        if found is not None:
            shape = profile.layers[found.first].image
            if shape is not None and shape[0] >= 2 * shape[1] * layout.ranks:
                yield cls(split="height")
        if spatial.images(profile, "units") is not None:
            yield cls(split="channel")

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        _refuse(profile.own_update, profile.carries)
        along = self.split in ("height", "width")
        found = spatial.images(profile, "height" if along else "units")
        if found is None:
            raise ValueError(nothing_to_divide(profile.name))
        if profile.untraceable is not None:
            raise ValueError(f"{profile.untraceable}; so it cannot be cut into parts of an image: use data_parallel")
        own = max(times(profile, layout), key=lambda o: o.of(profile.layers[found.first], profile.batch_size).both)
        if along:
            run = spatial.spatial(profile, layout, own, found, columns=self.split == "width")
        else:
            run = spatial.channels(profile, layout, own, found, groups=self.split == "group")
        return Cost(
            terms={
                **run.terms,
                "updating": own.update(run.weights),
                "waiting": run.terms["computing"] * chance(layout),
                "loading": profile.loading_seconds * profile.batch_size,
            },
            memory=held(profile, layout, run.weights, run.activations, share=1.0),
            examples=profile.batch_size,
            timeline=run.spans,
        )

    def build(self, workload: Workload, world: World) -> Step:
        _refuse(workload.update is not None, workload.carry is not None)
        return SplitStep(workload, world, self._part(world), again=self._part)

    def _part(self, world: World) -> MakePart:
        """Returns what makes a rank's part of the plain model, in this world."""
        group = world.group()
        return lambda model, sample: ReplicatedPart(model, cut_network(model, sample, group, self.split))

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _refuse(own_update: bool, carries: bool) -> None:
    if own_update:
        raise ValueError(
            "update= calls the network as it likes, or layers of it, and here what forward calls is cut: "
            "use data_parallel"
        )
    if carries:
        raise ValueError(
            "a recurrent state that is carried goes with the rows of a batch, which conv_parallel does not divide: "
            "use data_parallel, or wavefront_parallel"
        )

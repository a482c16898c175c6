"""The refusals of several strategies, known from a profile and a layout, in the words that they use when they are
built."""

from __future__ import annotations

from apportion.core.average import NO_AVERAGE
from apportion.cost_model.cluster import Placement
from apportion.cost_model.profile import Profile

WITHOUT_IMAGES = "data_parallel, fully_sharded, tensor_parallel, layer_placement or pipeline_parallel"
"""The strategies that divide a network which has no images."""


def nothing_to_divide(network: str) -> str:
    """The refusal of a network in which conv_parallel finds nothing to divide."""
    return (
        f"{network} has no convolution (nn.Conv1d, nn.Conv2d, nn.Conv3d) and no pooling over images for conv_parallel "
        f"to divide: use {WITHOUT_IMAGES}"
    )


def no_convolution(network: str) -> str:
    """The refusal of a network that hybrid_parallel cannot cut behind a convolution."""
    return (
        f"{network} has no convolution (nn.Conv1d, nn.Conv2d, nn.Conv3d), after which hybrid_parallel would slice the "
        f"layers: use {WITHOUT_IMAGES}, or say with data= or tensor= where it is to be cut"
    )


def must_feed(profile: Profile, workers: int, what: str = "workers") -> None:
    """Raise ValueError where a batch is too small to give each of this many an example."""
    rows = profile.batch_size
    if rows < workers:
        raise ValueError(
            f"batch_size={rows} cannot feed {workers} {what}: each needs at least one example; "
            f"use {what}<={rows} or batch_size>={workers}"
        )


def must_be_whole(profile: Profile, microbatches: int) -> None:
    """Raise ValueError where a worker's rows cannot be computed in this many parts."""
    if microbatches == 1:
        return
    cut = None
    if not profile.cut_by_rows:
        cut = "would cut the batch under a loss that couples examples: use microbatches=1"
    elif profile.own_update:
        cut = "would cut the batch under update=: use microbatches=1"
    elif profile.batch_norm:
        cut = (
            "would give batch normalisation the statistics of a part of the batch: use microbatches=1, or a "
            "normalisation that looks at one example (GroupNorm, LayerNorm)"
        )
    if cut is not None:
        raise ValueError(f"microbatches={microbatches} {cut}")


def must_have_store(profile: Profile, layout: Placement, *, servers: int = 0) -> None:
    """Raise ValueError where workers that share a store cannot run this workload, or not on this layout. ``servers``:
    the ranks that hold the shards for hosts that share no memory."""
    for what, given, cure in (
        ("update=", profile.own_update, "give a loss, or use data_parallel"),
        ("carry=", profile.carries, "a state follows its rows from batch to batch: use data_parallel"),
        ("average=", profile.averages, NO_AVERAGE),
        (
            f"accumulate={profile.accumulate}",
            profile.accumulate > 1,
            "use batch_size= times as many, or data_parallel, fully_sharded or single_device",
        ),
    ):
        if given:
            raise ValueError(f"{what} does not go with asynchronous workers: {cure}")
    if not profile.element_wise:
        raise ValueError(
            "its optimizer is not known to update each weight by itself, and a parameter store is cut anywhere: "
            "use data_parallel"
        )
    if any(layout.device(rank).kind != "cpu" for rank in layout.kinds):
        raise ValueError('device="cuda": a parameter store is memory of the host; use device="cpu"')
    if len(layout.hosts) > 1 and not servers:
        raise ValueError(
            f"workers on {len(layout.hosts)} hosts do not share memory, which a parameter store lies in: "
            "use one host, or data_parallel"
        )

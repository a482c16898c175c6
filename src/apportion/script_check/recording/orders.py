"""How a loader orders its rows and distributes them over the ranks, as its samplers declare it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.sampler import WeightedRandomSampler

_DEEPEST = 8


def order_of(loader: DataLoader[Any] | BatchSampler) -> dict[str, Any]:
    """Returns the fields of an event ``iteration`` on order and distribution, of a loader or of a batch sampler that
    the script reads by itself.

    ``sampler``: the type that makes the order. ``shuffles``: whether it declares that it shuffles, None where it does
    not say. ``replicas``: into how many parts it divides the rows, None where it does not. ``replacement``: whether it
    draws rows with replacement. ``pads``: whether it repeats rows until the last batches are whole.
    ``epochs``: whether it, or the data set, has ``set_epoch``.
    """
    chain = list(_chain(loader))
    innermost = chain[-1]
    holders = (*chain, getattr(loader, "dataset", None))
    replicas = [
        value
        for each in chain
        for value in (getattr(each, "num_replicas", None), getattr(each, "num_processes", None))
        if isinstance(value, int) and value > 1
    ]
    return {
        "sampler": type(innermost).__name__,
        "shuffles": _shuffles(innermost),
        "replicas": replicas[0] if replicas else None,
        "replacement": isinstance(innermost, WeightedRandomSampler) or bool(getattr(innermost, "replacement", False)),
        "pads": any(hasattr(each, "even_batches") or hasattr(each, "split_batches") for each in holders),
        "epochs": any(hasattr(each, "set_epoch") for each in holders),
    }


def _chain(loader: DataLoader[Any] | BatchSampler) -> Any:
    """The samplers of a loader, from the one that it calls to the one that makes the order."""
    each: Any = loader
    if isinstance(loader, DataLoader):
        each = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(_DEEPEST):
        yield each
        inner = getattr(each, "batch_sampler", None)
        inner = getattr(each, "sampler", None) if inner is None else inner
        if inner is None or inner is each or not hasattr(inner, "__iter__"):
            return
        each = inner


def _shuffles(sampler: Any) -> bool | None:
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return True
    if isinstance(sampler, SequentialSampler | BatchSampler):
        return False
    declared = getattr(sampler, "shuffle", None)
    return declared if isinstance(declared, bool) else None

"""Weights whose gradient is zero but for rounding, which some optimizers turn into steps of their own.

The gradient of a bias before a normalisation, or of the keys of an attention, is zero, and rounding leaves 1e-18 of it,
which differs between the ranks and one process. An optimizer that divides by the size of the gradient (Adagrad) makes
a step of it that is far above rounding, and the network is the same: its outputs do not depend on these weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apportion.script_check.comparison.tensors import FLOOR, Array, scale_of
from apportion.script_check.record import Event, RankRecord

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def without_noise(ranks: Sequence[RankRecord], union: RankRecord) -> tuple[list[RankRecord], RankRecord]:
    """Returns the records with zeros in the place of all weights whose gradients are zero but for rounding, on every
    rank and at every step. A gradient that is exactly zero everywhere is no such gradient."""
    records = [*ranks, union]
    noise = {name: mask for name, mask in _noise(records).items() if mask.any()}
    if not noise:
        return list(ranks), union
    *cleared, alone = (
        replace(record, events=tuple(_cleared(event, noise) for event in record.events)) for record in records
    )
    return cleared, alone


def _noise(records: Sequence[RankRecord]) -> dict[str, Mask]:
    small, some = defaultdict[str, list[Mask]](list), defaultdict[str, list[Mask]](list)
    for step in (step for record in records for step in record.steps):
        floor = FLOOR * scale_of(step["gradients"])
        for name, gradient in step["gradients"].items():
            if gradient is not None:
                small[name].append(np.abs(gradient) <= floor)
                some[name].append(gradient != 0)
    return {
        name: np.logical_and.reduce(masks) & np.logical_or.reduce(some[name])
        for name, masks in small.items()
        if len({mask.shape for mask in masks}) == 1
    }


def _cleared(event: Event, noise: Mapping[str, Mask]) -> Event:
    if event["kind"] not in ("step", "network"):
        return event
    weights: dict[str, Array] = {
        name: np.where(noise[name], 0.0, array) if name in noise and noise[name].shape == array.shape else array
        for name, array in event["weights"].items()
    }
    return {**event, "weights": weights}

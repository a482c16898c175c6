"""What workers have measured of a workload, made into its profile."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.comm.channel import Message
from apportion.profile import LayerProfile, Pass, Profile, Timing


@dataclass
class Found:
    """By the workers of one setting."""

    loading: float
    """Seconds of an example."""
    passes: list[Pass] = field(default_factory=list)
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    """By the names of layers."""


def made(name: str | None, device: str, facts: Message, found: Sequence[Found]) -> Profile:
    """The profile: of ``facts`` that one worker has told, and times from all settings. ``name``: None: the model's."""
    told = {what: value for what, value in facts.items() if what not in ("kind", "layers", "model", "parameter_bytes")}
    passes = tuple(p for f in found for p in f.passes)
    layers = [_layer(layer, found) for layer in facts["layers"]]
    if not layers:  # one that is not known to have parts
        layers = [_as_one(facts["model"], facts["parameter_bytes"], passes)]
    return Profile(
        **told,
        name=facts["model"] if name is None else name,
        device=device,
        layers=tuple(layers),
        passes=passes,
        loading_seconds=statistics.median(f.loading for f in found),
    )


def mean(answers: Sequence[Message]) -> dict[str, float] | None:
    """Of a part, by all ranks; None where the layer cannot be cut so."""
    if answers[0]["share"] is None:
        return None
    return {what: statistics.mean(a[what] for a in answers) for what in ("share", "forward", "backward")}


def scaled(layers: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, float]], total: float) -> dict[str, float]:
    """Seconds of each layer in one direction: the mean of all ranks and of all layers that are alike, and together the
    total. The loss belongs to the last of them."""
    known = {layer["name"]: statistics.mean(t.get(layer["name"], 0.0) for t in told) for layer in layers}
    alike: dict[str, list[float]] = {}
    for layer in layers:
        alike.setdefault(layer["like"], []).append(known[layer["name"]])
    found = {layer["name"]: statistics.mean(alike[layer["like"]]) for layer in layers}
    found[layers[-1]["name"]] += statistics.mean(t.get("", 0.0) for t in told)
    both = sum(found.values())
    return {name: seconds * total / both if both else total / len(layers) for name, seconds in found.items()}


def _layer(told: dict[str, Any], found: Sequence[Found]) -> LayerProfile:
    rest = {k: v for k, v in told.items() if k not in ("like", "ways", "inputs", "image", "across")}
    image, across = told.get("image"), told.get("across")
    return LayerProfile(
        **rest,
        inputs=tuple(told["inputs"]),
        ways=tuple(told["ways"]),
        image=None if image is None else (image[0], image[1], image[2]),
        across=None if across is None else (across[0], across[1], across[2]),
        timings=tuple(t for f in found for t in f.timings.get(told["name"], ())),
    )


def _as_one(model: str, parameter_bytes: int, passes: Sequence[Pass]) -> LayerProfile:
    timings = (
        Timing(rows=p.rows, threads=p.threads, together=p.together, forward=p.forward, backward=p.backward)
        for p in passes
    )
    return LayerProfile(
        name=model,
        kind=model,
        inputs=(),
        parameter_bytes=parameter_bytes,
        activation_bytes=0,
        kept_bytes=0,
        flops=0.0,
        timings=tuple(timings),
    )

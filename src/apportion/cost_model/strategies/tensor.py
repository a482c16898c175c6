"""The price of a network whose layers are sliced over the ranks, each working on the same rows: sums and gathers.

Which layers are sliced, and how, is worked out from the profile as ``parallel/tensor/sharding_plan.py`` does from the
model: pairs of Linear layers with nothing but element-wise functions between them, what is wide enough alone,
embeddings, attention by heads, recurrent layers by hidden units. The last layer is taken for logits under a
cross-entropy, which stay in slices.

In a hybrid each rank computes the first layers for some of the rows, and the last layers are sliced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import Collective
from apportion.cost_model.compute import LayerTimes, chance, held, times
from apportion.cost_model.cost import Cost
from apportion.cost_model.elementwise import ACTIVATIONS
from apportion.cost_model.partitioning import chain
from apportion.cost_model.profile import LayerProfile, Profile

SLICE_CALLS = 40.0
"""The overhead of a sliced layer each way besides its products and what travels, in calls: two autograd functions and a
wait in Python. It is an estimate; the measured step of a small MLP comes out within 10 %."""
How = Literal["columns", "row", "alone", "output", "vocabulary", "heads", "units", "block"]
_WAYS: dict[How, str] = {"row": "inputs"}
_KINDS: dict[str, How] = {
    "Embedding": "vocabulary",
    "MultiheadAttention": "heads",
    "LSTM": "units",
    "GRU": "units",
    "RNN": "units",
    "TransformerEncoderLayer": "block",
    "TransformerDecoderLayer": "block",
}
_ELEMENTWISE = frozenset((
    *(name.replace("_", "") for name in ACTIVATIONS), "identity", "dropout", "mul", "add", "sub", "truediv", "div",
    "neg", "square", "abs", "exp", "log", "sqrt", "rsqrt", "pow", "clamp", "sin", "cos", "erf", "clone", "contiguous",
    "imul", "iadd", "isub",
))  # fmt: skip
"""The kinds of layers that treat each number by itself, in small letters and without underscores."""


def is_elementwise(layer: LayerProfile) -> bool:
    """Does the layer treat each number by itself?"""
    return layer.kind.replace("_", "").lower() in _ELEMENTWISE


def width(profile: Profile, layer: LayerProfile) -> tuple[float, float]:
    """The (inputs, outputs) of a Linear layer or an embedding, from its FLOPs, bytes and weights."""
    numbers = layer.activation_bytes / 4
    if layer.flops > 0:
        inputs = max(1.0, layer.flops / 2 / max(1.0, numbers))
        return inputs, max(1.0, layer.parameter_bytes / 4 / (inputs + 1))
    outputs = max(1.0, numbers / profile.batch_size / layer.length)
    return max(1.0, layer.parameter_bytes / 4 / outputs), outputs


def sliced(profile: Profile, *, min_width: int, among: Sequence[LayerProfile] | None = None) -> dict[str, How]:
    """The way in which each sliced layer is divided, by its name; layers that are not there stay whole. Where nothing
    is ``min_width`` wide, narrow layers are sliced all the same."""
    layers = profile.layers if among is None else among
    found: dict[str, How] = {}
    for least in (min_width, 1):
        if not found:
            found = _sliced(profile, layers, least)
    return found


def _sliced(profile: Profile, layers: Sequence[LayerProfile], least: int) -> dict[str, How]:
    can = [layer for layer in layers if set(layer.ways) & {"units", "inputs"}]
    found: dict[str, How] = {}
    for layer in can:
        how = _KINDS.get(layer.kind)
        if how is not None and (how != "vocabulary" or min(width(profile, layer)) >= least):
            found[layer.name] = how
    linear = {layer.name: layer for layer in can if layer.kind == "Linear"}
    by_name, users = {layer.name: layer for layer in profile.layers}, _users(profile)
    free = {name for name in linear if name not in found}
    for row in linear.values():
        if row.name in free and "inputs" in row.ways:
            columns = _columns(by_name, row, free - {row.name}, users)
            found |= dict.fromkeys(columns, "columns")
            if columns:
                found[row.name] = "row"
                free -= {row.name, *columns}
    last = profile.layers[-1].name
    for name, layer in linear.items():
        if name not in found and min(width(profile, layer)) >= least:
            found[name] = "output" if name == last else "alone"
    return found


def _users(profile: Profile) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for layer in profile.layers:
        for source in layer.inputs:
            users.setdefault(source, []).append(layer.name)
    return users


def _columns(
    by_name: Mapping[str, LayerProfile], row: LayerProfile, free: set[str], users: Mapping[str, list[str]]
) -> set[str]:
    """The Linear layers whose outputs reach ``row`` through element-wise layers, and nothing else; none where there is
    anything else on the way."""
    between: set[str] = set()
    columns: set[str] = set()
    waiting = list(row.inputs)
    while waiting:
        name = waiting.pop()
        if name in between or name in columns:
            continue
        layer = by_name.get(name)
        if layer is None:
            return set()
        if name in free:
            columns.add(name)
        elif is_elementwise(layer):
            between.add(name)
            waiting += layer.inputs
        else:
            return set()
    inside = between | columns | {row.name}
    return columns if all(user in inside for name in between | columns for user in users.get(name, ())) else set()


@dataclass
class Sliced:
    """The seconds and bytes of a rank that has slices of the layers."""

    computing: float = 0.0
    communicating: float = 0.0
    weights: float = 0.0
    activations: float = 0.0


class Slices:
    """The layers of a network on the ranks of a layout, of which each has a slice of those in ``how``."""

    def __init__(self, profile: Profile, layout: Placement, own: LayerTimes, how: Mapping[str, How]) -> None:
        self._batch, self._own, self._how = profile.batch_size, own, how
        self._by_name = {layer.name: layer for layer in profile.layers}
        self._between = _in_slices(profile, how)
        self._n, self._ranks = layout.ranks, Collective.among(layout, range(layout.ranks))

    def price(self, layers: Iterable[LayerProfile], *, rows: float) -> Sliced:
        """The price of some of the layers, on this many rows."""
        found = Sliced()
        for layer in layers:
            cut = self._how.get(layer.name)
            share = 1.0 / self._n if cut is not None or layer.name in self._between else 1.0
            way = _WAYS.get(cut, "units") if cut is not None else ""
            found.computing += self._own.of(layer, rows, way=way if share < 1.0 else "", share=share).both
            found.weights += layer.parameter_bytes * (share if cut else 1.0)
            found.activations += layer.kept_bytes * share * rows / self._batch
            if cut is not None and self._n > 1:
                given = [self._by_name[name] for name in layer.inputs if name in self._by_name]
                found.communicating += _travels(self._ranks, layer, cut, given, rows / self._batch, self._own.call)
        return found


def _in_slices(profile: Profile, how: Mapping[str, How]) -> set[str]:
    """The element-wise layers inside of pairs, which work on slices."""
    found: set[str] = set()
    for layer in profile.layers:
        came = [name for name in layer.inputs if how.get(name) == "columns" or name in found]
        if came and layer.name not in how and is_elementwise(layer):
            found.add(layer.name)
    return found


def _travels(
    ranks: Collective, layer: LayerProfile, cut: How, given: Sequence[LayerProfile], part: float, call: float
) -> float:
    """Seconds of what a sliced layer sends forward and backward, and of the bookkeeping around it. The network's own
    arguments get no gradient."""
    out = layer.activation_bytes * part
    back = sum(source.activation_bytes for source in given) * part
    calls = 2 * SLICE_CALLS * call

    def sums(nbytes: float) -> float:
        return ranks.all_reduce(nbytes) if nbytes else 0.0

    match cut:
        case "columns":
            return sums(back) + calls / 2
        case "row" | "vocabulary":
            return sums(out) + calls / 2
        case "alone":
            return ranks.all_gather(out) + sums(back) + calls
        case "output":  # three numbers a row instead of the logits
            return 3 * sums(out / max(1.0, layer.parameter_bytes / 4 / 32)) + sums(back) + calls
        case "heads":
            return sums(out) + sums(back) + calls
        case "block":
            return 2 * (sums(out) + sums(back) + calls)
        case "units":  # at every moment of every layer
            moments = max(1, layer.length) * layer.stack
            return 2 * moments * (ranks.all_gather(out / max(1, layer.length)) + calls / 2)


def hybrid_cost(profile: Profile, layout: Placement, at: int, how: dict[str, How], *, rotates: bool) -> Cost:
    """The cost of a step with the layers before ``at`` on a share of the rows, and the others sliced as ``how``
    says."""
    n, batch = layout.ranks, profile.batch_size
    ranks = Collective.among(layout, range(n))
    own = _slowest(profile, layout)
    front, back = profile.layers[:at], profile.layers[at:]
    rows = -(-batch // n)
    computing = sum(seconds.both for seconds in own.each(rows)[:at])
    weights = sum(layer.parameter_bytes for layer in front)
    crossing = profile.crossing_bytes[at]
    parts = n if rotates else 1
    sliced = Slices(profile, layout, own, how).price(back, rows=batch / parts)
    norms = sum("BatchNorm" in layer.kind for layer in front)
    # A share's activations arrive while the one before is computed: only the first is waited for.
    exchange = ranks.all_gather(crossing) / parts
    return Cost(
        terms={
            "computing": computing + sliced.computing * parts,
            "communicating": exchange
            + sliced.communicating * parts
            + ranks.all_reduce(weights)
            + 4 * norms * ranks.all_reduce(64),
            "updating": own.update(weights + sliced.weights, fused=True),
            "waiting": (computing + sliced.computing * parts) * chance(layout),
            "loading": profile.loading_seconds * batch,
        },
        memory=held(
            profile,
            layout,
            weights + sliced.weights,
            sum(layer.kept_bytes for layer in front) / n + sliced.activations,
            share=1.0,
        ),
        examples=batch,
    )


def first_sliced_layer(profile: Profile, layout: Placement, how: dict[str, How], *, least: int) -> int | None:
    """The layer from which on all are best sliced, or computed whole on every rank, instead of each rank taking some of
    the rows: the chain's cheapest choices, from ``least`` on. None: there is none."""
    n, ranks, own = layout.ranks, Collective.among(layout, range(layout.ranks)), _slowest(profile, layout)
    slices, by_rows, costs = Slices(profile, layout, own, how), own.each(profile.batch_size / n), []
    for i, layer in enumerate(profile.layers):
        dealt = by_rows[i].both + ranks.all_reduce(layer.parameter_bytes)
        cut = slices.price([layer], rows=profile.batch_size)
        updates = own.update(layer.parameter_bytes, fused=True), own.update(cut.weights, fused=True)
        costs.append((dealt + updates[0], cut.computing + cut.communicating + updates[1] if i >= least else inf))

    def change(i: int, a: int, b: int) -> float:
        if a == b:
            return 0.0
        return ranks.all_gather(profile.crossing_bytes[i]) if (a, b) == (0, 1) else inf

    _, choices = chain(costs, change)
    return choices.index(1) if 1 in choices else None


def _slowest(profile: Profile, layout: Placement) -> LayerTimes:
    """The layer times of the rank that takes longest for the same work."""
    return max(
        dict.fromkeys(times(profile, layout)),
        key=lambda own: sum(seconds.both for seconds in own.each(profile.batch_size)),
    )

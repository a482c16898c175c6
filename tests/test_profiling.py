"""Profiles that are measured: what they say of a network, whatever its times are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import example_networks
import networks
import pytest
import torch
from ranks import by_value
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.cluster import Cluster, Device, Link, Rate
from apportion.planner.profiling import profile
from apportion.pricing.layout import Layout
from apportion.profile import LayerProfile, Profile

RATES = (Rate(threads=1, together=1, flops=1e10, bytes_per_second=1e10),)
HERE = Device(name="a/cpu", host="a", kind="cpu", model="here", memory_bytes=1 << 30, rates=RATES, cores=2)
MEMORY = Link(kind="memory", devices=("a/cpu",), latency=1e-5, bandwidth=1e9)
CLUSTER = Cluster(name="a", devices=(HERE,), links=(MEMORY,))
TWO = Layout(cluster=CLUSTER, devices=("a/cpu", "a/cpu"))
ALONE = Layout(cluster=CLUSTER, devices=("a/cpu",))


def measured(workload: Workload, *layouts: Layout, seconds: float = 2.0) -> Profile:
    with by_value(networks), by_value(example_networks), by_value(sys.modules[__name__]):
        return profile(workload, CLUSTER, layouts or (TWO,), seconds=seconds)


def named(found: Profile, name: str) -> LayerProfile:
    return next(layer for layer in found.layers if layer.name == name)


def shares(layer: LayerProfile) -> dict[str, list[float]]:
    return {way: [t.share for t in layer.timings if t.way == way] for way in layer.ways}


def add_up(found: Profile) -> None:
    """The layers to the whole, at every number of rows."""
    assert found.passes
    for a_pass in found.passes:
        for what in ("forward", "backward"):
            whole = [
                getattr(t, what)
                for layer in found.layers
                for t in layer.timings
                if not t.way and (t.rows, t.threads, t.together) == (a_pass.rows, a_pass.threads, a_pass.together)
            ]
            assert len(whole) == len(found.layers)
            assert sum(whole) == pytest.approx(getattr(a_pass, what))


def test_an_mlp_in_two_layouts() -> None:
    found = measured(networks.cases["mlp"](16), ALONE, TWO)
    assert [layer.kind for layer in found.layers] == ["Linear", "ReLU", "Linear"]
    assert [(p.threads, p.together, p.rows) for p in found.passes] == [
        (1, together, rows) for together in (1, 2) for rows in (16, 8, 2)
    ]
    add_up(found)
    assert shares(found.layers[0]) == {"units": [0.5], "inputs": [0.5]}
    assert {t.together for layer in found.layers for t in layer.timings if t.way} == {2}
    assert found.layers[0].flops == 2 * 16 * 10 * 16
    assert found.layers[0].kept_bytes == 0  # its input is the network's
    assert found.layers[1].kept_bytes == 16 * 16 * 8
    assert found.layers[2].kept_bytes == 0  # what the ReLU keeps
    assert (found.slots, found.examples, found.element_wise, found.precision) == (1, 49, True, "float64")
    assert all(p.forward > 0 and p.backward > 0 and p.update > 0 for p in found.passes)
    assert found.loading_seconds > 0
    assert Profile.from_json(found.to_json()) == found


def test_a_cnn_with_batch_normalisation() -> None:
    found = measured(networks.cases["batch_norm_2d"](16))
    add_up(found)
    conv, norm = found.layers[:2]
    assert found.batch_norm
    assert found.buffer_bytes == 4 * 8 * 2 + 8
    assert conv.image == (4, 3, 1)
    assert shares(conv) == {"units": [0.5], "inputs": [0.5], "height": [0.5]}
    assert shares(norm) == {"height": [0.5]}
    assert named(found, "3").ways == ()  # flatten


def test_recurrent_layers_one_by_one_and_in_chunks() -> None:
    def model() -> nn.Module:
        return Last(nn.LSTM(6, 8, 2, batch_first=True))

    data = lambda: TensorDataset(networks.numbers(20, 64, 6), networks.classes(20, 8))  # noqa: E731
    found = measured(networks.workload(model, data, 10, optimizer=networks.adam), seconds=6.0)
    add_up(found)
    lstm = named(found, "net")
    assert (lstm.stack, lstm.length) == (2, 64)
    assert lstm.ways == ("layer", "chunk", "units")
    known = shares(lstm)
    assert (known["units"], known["layer"]) == ([0.5], [0.5])
    assert len(known["chunk"]) == 1
    assert 0 < known["chunk"][0] < 0.5
    assert found.slots == 2


class Last(nn.Module):
    """The outputs after the last moment."""

    def __init__(self, net: nn.LSTM) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0][:, -1]


def test_blocks_that_are_repeated_share_their_times() -> None:
    found = measured(example_networks.examples["transformer"](4), seconds=4.0)
    add_up(found)
    first, second = (named(found, f"blocks.{i}.attention") for i in (0, 1))
    assert first.timings == second.timings
    assert shares(first) == {"units": [0.5]}
    assert "blocks.0.norm1" in first.inputs
    assert shares(named(found, "characters")) == {"units": [0.5]}


def test_a_carried_state_is_taken_along() -> None:
    found = measured(example_networks.examples["char_lstm"](4))
    add_up(found)
    assert found.carries
    assert next(layer for layer in found.layers if layer.kind == "LSTM").stack == 4


def test_an_update_of_its_own_is_known_as_a_whole() -> None:
    found = measured(networks.cases["two_optimizers"](16))
    assert found.own_update
    assert len(found.layers) == 1
    assert found.layers[0].parameter_bytes > 0
    assert found.untraceable
    add_up(found)
    assert all(p.backward == pytest.approx(2 * p.forward) for p in found.passes[:1])


def test_a_batch_larger_than_the_data_is_what_there_is() -> None:
    found = measured(networks.workload(networks.perceptron, networks.tabular(16, 10), 100), seconds=0.2)
    assert found.batch_size == found.examples == 49
    assert [p.rows for p in found.passes] == [49, 25, 7]


class Deciding(nn.Module):
    """By the numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h) if bool(h.sum() > 0) else torch.tanh(h))


def test_a_network_that_cannot_be_followed_has_layers_and_no_ways() -> None:
    found = measured(networks.workload(Deciding, networks.tabular(16, 10), 16))
    assert [layer.name for layer in found.layers] == ["a", "b"]
    assert all(layer.ways == () for layer in found.layers)
    assert found.untraceable is not None
    assert "Deciding" in found.untraceable
    add_up(found)


Case = Callable[[int], Workload]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": None}, lambda p: not p.cut_by_rows),
        ({"optimizer": lambda p: torch.optim.LBFGS([q for _, q in p])}, lambda p: not p.element_wise),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, lambda p: p.slots == 0),
        ({"clip_grad_norm": 1.0}, lambda p: p.passes[0].fused_update is not None),
    ],
    ids=["coupled", "lbfgs", "sgd", "clipped"],
)
def test_what_strategies_ask_of_a_workload(change: dict[str, object], says: Callable[[Profile], bool]) -> None:
    workload = replace(networks.cases["mlp"](16), **change)  # type: ignore[arg-type]
    assert says(measured(workload, ALONE, seconds=0.2))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds=0 must be above 0"):
        measured(networks.cases["mlp"](16), seconds=0)
    other = replace(HERE, name="b/cpu", host="b", model="other")
    both = replace(CLUSTER, devices=(HERE, other))
    with pytest.raises(ValueError, match="no layout has a worker on b/cpu"):
        profile(networks.cases["mlp"](16), both, [ALONE], device="b/cpu")
    broken = networks.workload(networks.perceptron, networks.tabular(16, 10), 16, loss=lambda y, t: y)
    with pytest.raises(ValueError, match="must be one number"):
        measured(broken, ALONE)

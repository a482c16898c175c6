"""Profiles that are measured: what they say of a network, whatever its times are."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import example_networks
import networks
import played
import pytest
import torch
from ranks import by_value
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.comm.world import World
from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Rate
from apportion.cost_model.profile import LayerProfile, Pass, Profile
from apportion.profiler import measure_workload, workload_worker
from apportion.profiler.measure_workload import _few_rows, profile

pytestmark = pytest.mark.processes

RATES = (Rate(threads=1, together=1, flops=1e10, bytes_per_second=1e10),)
HERE = Device(name="a/cpu", host="a", kind="cpu", model="here", memory_bytes=1 << 30, rates=RATES, cores=2)
MEMORY = Link(kind="memory", devices=("a/cpu",), latency=1e-5, bandwidth=1e9)
CLUSTER = Cluster(name="a", devices=(HERE,), links=(MEMORY,))
TWO = Placement(cluster=CLUSTER, devices=("a/cpu", "a/cpu"))
ALONE = Placement(cluster=CLUSTER, devices=("a/cpu",))


def measured(workload: Workload, *layouts: Placement, seconds: float = 2.0) -> Profile:
    with by_value(networks), by_value(example_networks), by_value(sys.modules[__name__]):
        return profile(workload, CLUSTER, layouts or (TWO,), seconds=seconds)


def named(found: Profile, name: str) -> LayerProfile:
    return next(layer for layer in found.layers if layer.name == name)


def shares(layer: LayerProfile) -> dict[str, list[float]]:
    return {way: [t.share for t in layer.timings if t.way == way] for way in layer.ways}


def add_up(found: Profile, alone: bool = False) -> None:
    """The layers to the whole, at every number of rows; of who computes alone at the fewest."""
    assert found.passes
    for a_pass in found.passes[-1:] if alone else found.passes:
        for what in ("forward", "backward"):
            whole = [
                getattr(t, what)
                for layer in found.layers
                for t in layer.timings
                if not t.way and (t.rows, t.threads, t.together) == (a_pass.rows, a_pass.threads, a_pass.together)
            ]
            assert len(whole) == len(found.layers)
            assert sum(whole) == pytest.approx(getattr(a_pass, what))


@pytest.mark.thorough
def test_an_mlp_in_two_layouts() -> None:
    found = measured(networks.cases["mlp"](16), ALONE, TWO)
    assert [layer.kind for layer in found.layers] == ["Linear", "ReLU", "Linear"]
    assert [(p.together, p.rows) for p in found.passes] == [(1, 16), (1, 2), (2, 16), (2, 8), (2, 2)]
    add_up(replace(found, passes=found.passes[:2]), alone=True)
    add_up(replace(found, passes=found.passes[2:]))
    assert [t.rows for t in found.layers[0].timings if t.together == 1] == [2], "the proportions are known from few"
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


@pytest.mark.thorough
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


def test_images_and_windows_that_are_not_square_are_known_on_both_sides() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, (3, 5)), nn.Conv2d(4, 4, 3, stride=(1, 2), groups=2), nn.Flatten(1))

    data = lambda: TensorDataset(networks.numbers(20, 2, 8, 12), networks.classes(20, 48))  # noqa: E731
    found = measured(networks.workload(model, data, 10), ALONE, seconds=0.5)
    first, second = found.layers[:2]
    assert (first.image, first.across, first.groups) == ((8, 3, 1), (12, 5, 1), 1)
    assert (second.image, second.across, second.groups) == ((6, 3, 1), (8, 3, 2), 2)
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_blocks_that_are_repeated_share_their_times() -> None:
    found = measured(example_networks.examples["transformer"](4), seconds=4.0)
    add_up(found)
    first, second = (named(found, f"blocks.{i}.attention") for i in (0, 1))
    assert first.timings == second.timings
    assert shares(first) == {"units": [0.5]}
    assert "blocks.0.norm1" in first.inputs
    assert shares(named(found, "characters")) == {"units": [0.5]}


@pytest.mark.thorough
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
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, fused=True)}, lambda p: p.whole_updates),
        ({"clip_grad_norm": 1.0}, lambda p: p.passes[0].fused_update is not None),
    ],
    ids=["coupled", "lbfgs", "sgd", "fused sgd", "clipped"],
)
def test_what_strategies_ask_of_a_workload(change: dict[str, object], says: Callable[[Profile], bool]) -> None:
    workload = replace(networks.cases["mlp"](16), **change)  # type: ignore[arg-type]
    assert says(measured(workload, ALONE, seconds=0.2))


# What takes long


@pytest.mark.parametrize(
    ("slow_seconds", "steps", "calls"), [(0.0, 3, 2), (1e9, 7, 4)], ids=["what takes long", "what is quick"]
)
def test_runs_are_repeated_by_how_long_they_take(
    slow_seconds: float, steps: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_worker, "SLOW_SECONDS", slow_seconds)
    monkeypatch.setattr(workload_worker, "clock", lambda device: next(times))
    times = (float(second) for second in itertools.count())
    timed = workload_worker.StepProfiler(networks.cases["mlp"](16), World.from_env(device="cpu"))
    for least, expected in ((workload_worker.STEPS, steps), (workload_worker.CALLS, calls)):
        assert len(list(timed._timed(0.5, least))) == expected, "the time is up before"


def test_every_other_step_has_a_fused_update_and_the_first_counts_for_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = workload_worker.StepProfiler(networks.cases["mlp"](16), World.from_env(device="cpu"))
    own, before = timed._own.step, timed._own.replica.step
    updates = list[str]()
    plain, fused = own.update, timed._fused
    assert fused is not None
    monkeypatch.setattr(own, "update", lambda: (updates.append("plain"), plain())[1])
    monkeypatch.setattr(timed, "_fused", lambda: (updates.append("fused"), fused())[1])
    told = timed.whole(8, 0.0)
    assert updates == ["plain", "fused"] * 4
    assert timed._own.replica.step == before + 8
    assert told["rows"] == 8
    assert min(told[what] for what in ("forward", "backward", "update", "fused")) > 0


@pytest.mark.parametrize(("seconds", "rows"), [((0.8, 0.4, 0.12), 2), ((0.8, 0.4, 0.02), 8), ((0.03, 0.02, 0.01), 16)])
def test_parts_are_timed_on_the_fewest_rows_that_take_long_enough(seconds: tuple[float, ...], rows: int) -> None:
    passes = [Pass(rows=r, forward=s / 2, backward=s / 2, update=0.1) for r, s in zip((16, 8, 2), seconds, strict=True)]
    assert _few_rows(passes) == rows


@pytest.mark.thorough
def test_parts_on_fewer_rows_are_told_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_workload, "PARTS_STEP_SECONDS", 0.0)
    found = measured(networks.cases["mlp"](16))
    first = found.layers[0]
    parts = [t for t in first.timings if t.way]
    assert {t.way for t in parts} == {"units", "inputs"}
    assert {(t.rows, t.share) for t in parts} == {(16, 0.5)}


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


def test_a_frame_is_timed_in_the_environment_and_in_acting() -> None:
    """Of a network that makes its examples by what it does: both are parts of loading."""
    with by_value(played):
        found = profile(played.workload(), CLUSTER, (ALONE,), seconds=1.0)
    assert found.frames == 24
    assert found.environment_seconds > 0
    assert found.acting_seconds > 0
    assert found.environment_seconds + found.acting_seconds <= 1.5 * found.loading_seconds


@pytest.mark.thorough
def test_rollouts_of_other_sizes_are_timed_in_every_place_with_one_thread() -> None:
    """As many sizes as there is time for on a machine that may be busy; the workload's own in any case."""
    with by_value(played):
        found = profile(played.workload(), CLUSTER, (ALONE, TWO), seconds=1.0, rollouts=2.0)
    times = found.rollouts
    assert times is not None
    assert (times.environments, times.steps) == (4, 6)
    assert times.places == [("here", 1), ("here", 2)]
    for together in (1, 2):
        assert {1, 4} <= {t.environments for t in times.played if t.together == together} <= {1, 4, 16}
        sizes = {(t.environments, t.steps) for t in times.learned if t.together == together}
        assert {(4, 6)} < sizes <= {(k, t) for k in (1, 4, 16) for t in (1, 6, 24)}
    assert min(min(t.environment, t.acting) for t in times.played) > 0
    assert min(min(t.forward, t.backward, t.update) for t in times.learned) > 0


@pytest.mark.parametrize("case", ["recurrent_normalised", "by_torch"])
def test_rollouts_of_any_network_are_timed(case: str) -> None:
    with by_value(played):
        found = profile(played.workload(**played.cases[case]), CLUSTER, (ALONE,), seconds=0.5, rollouts=1.0)
    assert found.rollouts is not None
    assert {(1, 6), (4, 6)} <= {*found.rollouts.sizes("here", 1)}


def test_what_is_given_has_no_frames() -> None:
    """Nor is anything measured of rollouts, however much time there is for them."""
    with by_value(networks):
        given = networks.workload(networks.perceptron, networks.tabular(16, 10), 16)
        began = time.monotonic()
        found = profile(given, CLUSTER, (ALONE,), seconds=0.5, rollouts=1000.0)
    assert (found.frames, found.environment_seconds, found.acting_seconds) == (0, 0.0, 0.0)
    assert found.rollouts is None
    assert time.monotonic() - began < 500

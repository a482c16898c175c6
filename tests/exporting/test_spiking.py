"""Trained nets as spiking ones: small cases by hand, refusals by layer name, digits within two points."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from apportion.cli.failures import EXTRAS
from apportion.errors import NotVerified
from apportion.exporting.exporter import Data, export
from apportion.exporting.spiking import compile, report
from apportion.exporting.spiking.compile import _largest as largest
from apportion.exporting.spiking.compile import integers, quantized, quantized_outputs
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.conversion.rate_net import outputs
from apportion.exporting.spiking.graph import CurrentSource, Dense, Neurons, Readout, Reset, SpikingGraph
from apportion.exporting.spiking.simulator import Membranes, fan_out, simulate
from apportion.exporting.target import Examples
from apportion.exporting.targets import spiking


def one_neuron(current: float, steps: int, reset: Reset) -> SpikingGraph:
    """A neuron with the threshold 1 that a constant current flows into, and a readout of weight 1."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    return SpikingGraph(
        nodes=(
            CurrentSource(name="in", shape=(1,)),
            Dense(name="a", shape=(1,), weight=one, bias=zero + current),
            Neurons(name="n", shape=(1,), threshold=one[0, 0], reset=reset),
            Dense(name="b", shape=(1,), weight=one, bias=zero),
            Readout(name="out", shape=(1,)),
        ),
        edges=(("in", "a"), ("a", "n"), ("n", "b"), ("b", "out")),
        timesteps=steps,
    )


@pytest.mark.parametrize(
    ("current", "reset", "spikes"),
    [
        (0.75, "subtract", 3),  # v: .75, 1.5 fires .5, 1.25 fires .25, 1 fires 0
        (0.75, "zero", 2),  # v: .75, 1.5 fires 0, .75, 1.5 fires 0
        (2.5, "subtract", 4),  # once a step at the most
        (2.5, "subtract_clipped_multi", 10),  # v: 2.5 fires twice .5, 3 fires thrice 0, 2.5 twice, 3 thrice
        (-1.0, "subtract", 0),
    ],
)
def test_a_neuron_fires_as_computed_by_hand(current: float, reset: Reset, spikes: int) -> None:
    found = simulate(one_neuron(current, 4, reset), torch.zeros(1, 1))
    assert found.spikes["n"].tolist() == [spikes]
    assert found.operations["n"].tolist() == [spikes]
    assert found.outputs.tolist() == [[spikes / 4]]


@pytest.mark.parametrize(("reset", "spikes"), [("subtract", 0), ("subtract_clipped_multi", 1)])
def test_only_the_clipped_membrane_forgets_what_was_far_below_the_threshold(reset: Reset, spikes: int) -> None:
    graph = one_neuron(0.0, 2, reset)
    membrane = Neurons(name="n", shape=(1,), threshold=torch.ones(()), reset=reset)
    from apportion.exporting.spiking.simulator import fired

    currents = [torch.tensor([[x]]) for x in (-5.0, 2.0)]
    assert sum(int(x.sum()) for x in fired(membrane, currents, torch.zeros(()))) == spikes
    assert graph.neurons[0].reset == reset


class Residual(nn.Module):
    """A net with everything that folds: batch norm, option-A shortcuts, pools, clipped rectifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.pool, self.third = nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1)
        self.clip, self.drop, self.out = nn.ReLU6(), nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        shortcut = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        x = self.clip(self.second(x) + shortcut)
        x = functional.hardtanh(self.third(self.pool(x)), 0.0, 2.0)
        return self.out(self.drop(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


def settled(net: nn.Module) -> nn.Module:
    """The net with statistics of its own, in evaluation mode."""
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(20):
            net(torch.randn(16, 3, 16, 16))
    return net.eval()


def test_all_that_is_linear_folds_into_the_synapses_exactly() -> None:
    net, x = settled(Residual().train()), torch.randn(6, 3, 16, 16)
    stages = lowered(net, x)
    with torch.no_grad():
        expected = net.double()(x.double())
    torch.testing.assert_close(outputs(stages, [x.double()]), expected, rtol=1e-10, atol=1e-10)
    assert [len(stage.terms) for stage in stages.stages] == [1, 2, 1, 1]
    (pooled,) = stages.stages[2].terms[0].maps
    assert (tuple(pooled.weight.shape), pooled.stride) == ((8, 8, 6, 6), (2, 2)), "a pool and a convolution are one"


def test_with_many_steps_the_rates_come_near_the_net() -> None:
    net, x = settled(Residual().train()), torch.randn(4, 3, 16, 16)
    stages = lowered(net, x)
    from apportion.exporting.spiking.calibration.calibrate import percentiles

    scales = percentiles(stages, x.double(), share=1.0)
    expected = outputs(stages, [x.double()])
    errors = [
        float((simulate(assembled(stages, scales, steps), x).outputs - expected).abs().max()) for steps in (8, 64, 512)
    ]
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.02 * float(expected.abs().max())


def test_a_spike_counts_once_for_each_weight_that_it_meets() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    stages = lowered(net.eval(), torch.randn(2, 1, 3, 3))
    graph = assembled(stages, [torch.ones(1), torch.ones(2)], 4)
    first, second = (node.name for node in graph.neurons)
    assert fan_out(graph, first).tolist() == [[[8.0, 12, 8], [12, 18, 12], [8, 12, 8]]]
    assert fan_out(graph, second).flatten().tolist() == [3.0] * 18


def test_a_neuron_that_fires_for_no_example_is_silent() -> None:
    graph, net = one_neuron(0.75, 4, "subtract"), nn.Linear(1, 1).double()
    for inputs, silent in (([-1.0, -2.0], 1), ([-1.0, 0.0], 0)):
        batches = [torch.tensor([[value]], dtype=torch.float64) for value in inputs]
        assert report.cost(graph, [simulate(graph, x) for x in batches], net, batches[0]).silent == (silent,)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x)[0][:, 0])


class Recurring(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.out = kind(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0][:, -1])


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0]


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.left(x)) * torch.relu(self.right(x))


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), *layers)


ROW, IMAGE, SEQUENCE = torch.randn(4, 4), torch.randn(4, 1, 8, 8), torch.randn(4, 3, 4)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "max pool": (lambda: image(nn.ReLU(), nn.MaxPool2d(2)), IMAGE, r"layer 2 \(MaxPool2d\) .* use an average pool"),
    "adaptive max pool": (lambda: image(nn.AdaptiveMaxPool2d(1)), IMAGE, r"layer 1 \(AdaptiveMaxPool2d\) .*average"),
    "attention": (Attending, SEQUENCE, r"layer attend \(MultiheadAttention\) .* use convolutions"),
    "lstm": (lambda: Recurring(nn.LSTM), SEQUENCE, r"layer recurrent \(LSTM\) .* use convolutions or linear layers"),
    "gru": (lambda: Recurring(nn.GRU), SEQUENCE, r"layer recurrent \(GRU\) .* use convolutions or linear layers"),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), ROW, r"layer 1 \(Softmax\) .* leave it out"),
    "sigmoid": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), ROW, r"layer 1 \(Sigmoid\) .* use ReLU"),
    "leaky relu": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU()), ROW, r"layer 1 \(LeakyReLU\) .* use ReLU"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), ROW, r"layer 1 \(LayerNorm\) .*BatchNorm"),
    "gate": (Gated, ROW, r"the function mul in Gated cannot become spiking neurons: .* use sums"),
    "decision": (Deciding, ROW, "Deciding has no fixed graph .* decide nothing by the numbers"),
    "dynamic shape": (Selecting, ROW, "Selecting.* (decide nothing by the numbers|no rule converts it)"),
    "two inputs": (Two, (ROW, ROW), "Two takes inputs that are a tuple, .* one such input"),
    "padding between": (
        lambda: image(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()), IMAGE, r"layer 2 \(ReLU\) .* put a ReLU between them",
    ),
}  # fmt: skip


class AtLeastZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_min(0)


def test_clamp_min_is_a_rectifier() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 5), AtLeastZero(), nn.Linear(5, 2)), torch.randn(6, 4)
    assert torch.allclose(outputs(lowered(net, x), [x.double()]).float(), net(x), atol=1e-5)


def test_a_max_pool_whose_last_windows_are_cut_off_does_not_become_an_average() -> None:
    net = image(nn.ReLU(), nn.MaxPool2d(4, ceil_mode=True))
    with pytest.raises(ValueError, match=r"layer 2 \(MaxPool2d\) .*ceil_mode"):
        lowered(net, torch.randn(2, 1, 8, 8), average_instead_of_max=True)


def test_layers_that_were_folded_wrongly_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **others: Any) -> Any:
        net = lowered(*arguments, **others)
        return replace(net, stages=tuple(replace(stage, bias=-stage.bias) for stage in net.stages))

    monkeypatch.setattr(compile, "lowered", wrong)
    net, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), torch.rand(64, 4)
    data = Data(calibration=Examples(x, torch.zeros(64, dtype=torch.long)))
    with pytest.raises(NotVerified, match="as they were folded compute something else than the net"):
        export(net, x[:4], tmp_path / "net.nir", target="spiking(timesteps=4)", data=data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_become_neurons_is_refused_by_its_layer_with_the_cure(case: str, tmp_path: Path) -> None:
    make, sample, said = REFUSED[case]
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=said):
        export(make().eval(), sample, tmp_path / "net.nir", target="spiking(timesteps=4)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("spiking(timesteps=0)", "timesteps=0 must be a whole number"),
        ("spiking(most_lost=2)", "most_lost=2 is the share"),
        ("spiking(neuron='exact', timesteps=4)", "a number of steps of its own"),
        ("spiking(max_pool='average')", "must be trained again: give fine_tune_examples"),
        ("spiking(timesteps=4)", r"give data=Data\(calibration=...\)"),
        ("spiking(timesteps=4, fine_tune_examples=9)", r"needs training examples: give data=Data\(training=...\)"),
        ("spiking(timesteps=4, dialect='snntorch')", "snntorch"),
        ("spiking(timesteps=4, dialect='exact')", 'dialect="exact" is that of neuron="exact"'),
        ("spiking(timesteps=4, dialect='tonic')", "write one of nir, sinabs, spikingjelly, norse"),
        (
            "spiking(neuron='exact', max_pool='average')",
            "leave timesteps, fine_tune_examples, max_pool and dialect out",
        ),
    ],
)
def test_wrong_uses_say_the_cure(target: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "net.nir", target=target)
    assert list(tmp_path.iterdir()) == []


def test_without_nir_the_extra_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nir", None)
    monkeypatch.setattr(spiking, "compiled", lambda *_: pytest.fail("it may take minutes"))
    with pytest.raises(ModuleNotFoundError) as caught:
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "net.nir", target="spiking(timesteps=4)")
    assert EXTRAS[caught.value.name or ""] == "spiking"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Data]:
    """A convolutional net that has learned 1300 digits, and what an export may look at."""
    found = load_digits()
    x, y = torch.tensor(found.images / 16, dtype=torch.float32)[:, None], torch.tensor(found.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    learned, held_out = order[:1300], order[1300:]
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(8):
        for rows in learned[torch.randperm(len(learned))].split(64):
            optimizer.zero_grad()
            functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval(), Data(calibration=Examples(x[learned], y[learned]), held_out=Examples(x[held_out], y[held_out]))


def test_digits_in_four_steps_are_within_two_points_of_the_net(digits: tuple[nn.Module, Data], tmp_path: Path) -> None:
    net, data = digits
    assert data.held_out is not None
    made = export(net, data.held_out.inputs[:4], tmp_path / "net.nir", target="spiking(timesteps=4)", data=data)
    found = made.verification
    assert found.held_out == 497
    assert found.before["accuracy"] > 0.96
    assert found.after["accuracy"] > found.before["accuracy"] - 0.02
    assert made.about["current"] == "constant", "half a threshold lies in the biases"
    assert made.about["synaptic_operations"] > made.about["multiplications_of_the_net"]
    assert "spiking wins nothing here" in made.conclusion


@pytest.mark.thorough
def test_auto_takes_the_fewest_steps_that_lose_no_more_than_allowed(
    digits: tuple[nn.Module, Data], tmp_path: Path
) -> None:
    net, data = digits
    assert data.held_out is not None
    sample = data.held_out.inputs[:4]
    steps = []
    for lost in (0.2, 0.001):
        made = export(net, sample, tmp_path / "net.nir", target=f"spiking(most_lost={lost})", data=data)
        tried = made.tables[0].rows
        assert all(right < own - lost for _, right, own in tried[:-1])
        assert tried[-1][1] >= round(tried[-1][2] - lost, 4) - 1e-4
        steps.append(made.about["timesteps"])
    assert steps[0] < steps[1]


def test_exact_neurons_compute_the_net_of_integers_to_the_bit(digits: tuple[nn.Module, Data], tmp_path: Path) -> None:
    net, data = digits
    assert data.held_out is not None
    assert data.calibration is not None
    graph = quantized(lowered(net, data.calibration.inputs[:2]).to(torch.float32), data.calibration.inputs, levels=7)
    for node in graph.nodes:
        if isinstance(node, Dense | Neurons):
            numbers = node.weight if isinstance(node, Dense) else node.threshold
            assert bool((numbers == numbers.round()).all())
    x = integers(graph, torch.cat([data.held_out.inputs, torch.randn(200, 1, 8, 8) * 3]))
    expected, found = quantized_outputs(graph, x), simulate(graph, x)
    assert torch.equal(found.outputs.long(), expected)
    assert torch.equal(found.outputs, expected.to(found.outputs.dtype)), "they are whole numbers"
    assert found.steps <= graph.timesteps == 14
    assert any(bool((found.spikes[n.name] > found.counts[n.name].flatten(1).sum(1)).any()) for n in graph.neurons), (
        "some spikes were taken back"
    )
    made = export(net, data.held_out.inputs[:4], tmp_path / "net.nir", target="spiking(neuron='exact')", data=data)
    assert made.verification.difference == made.verification.limit == 0.0
    assert made.verification.after["accuracy"] > made.verification.before["accuracy"] - 0.01


@pytest.mark.parametrize(("width", "dtype"), [(12, torch.float32), (2000, torch.float64)])
def test_membranes_of_integers_stay_within_the_bound_that_their_type_is_chosen_by(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
    x = torch.randn(40, width)
    graph = quantized(lowered(net, x[:2]).to(torch.float32), x, levels=15)
    assert {node.weight.dtype for node in graph.nodes if isinstance(node, Dense)} == {dtype}
    reached: list[float] = []
    step = Membranes.step

    def watched(self: Membranes, current: Tensor | None) -> Tensor:
        found = step(self, current)
        reached.append(float(self.v.abs().max()))
        return found

    monkeypatch.setattr(Membranes, "step", watched)
    whole = integers(graph, x)
    assert torch.equal(simulate(graph, whole).outputs.long(), quantized_outputs(graph, whole))
    assert 0 < max(reached) <= largest(graph)

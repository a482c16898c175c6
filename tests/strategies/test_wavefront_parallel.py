"""wavefront_parallel: the layers of a recurrent net on different workers, a chunk of time apart, are the same net."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import adam
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.data.source import BatchSource
from apportion.core.sampler import DataShard
from apportion.core.strategy import State
from apportion.parallel.recurrent.cut import cut
from apportion.parallel.recurrent.layer import LSTMLayer, RecurrentLayer, TorchLayer, chunk_length, chunks, layer
from apportion.reporting.journal import read_events
from apportion.runtime.launch.local import Local
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel

pytestmark = pytest.mark.processes

WORDS = 9


class Letters(nn.Module):
    """A language model: embedding, recurrent layers, a linear layer."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.net = kind(5, 6, num_layers=layers, **options)
        self.out = nn.Linear(options.get("proj_size", 6), WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h, _ = self.net(self.embed(tokens))
        return self.out(h).transpose(1, 2)


class Carried(Letters):
    def forward(self, tokens: Tensor, state: Any) -> Any:  # type: ignore[override]
        h, state = self.net(self.embed(tokens), state)
        return self.out(h).transpose(1, 2), state


def sentences(time: int, rows: int = 5) -> Callable[[], TensorDataset]:
    n = networks.rows(rows)
    return lambda: TensorDataset(networks.classes(n, WORDS, time), networks.classes(n, WORDS, time, seed=2))


def letters(layers: int, *, time: int = 7, rows: int = 5, kind: Any = nn.LSTM, **options: Any) -> Workload:
    made = {name: options.pop(name) for name in ("bias", "proj_size", "dropout", "nonlinearity") if name in options}
    model = lambda: Letters(kind, layers, batch_first=True, **made)  # noqa: E731
    return networks.workload(model, sentences(time, rows), rows, **options)


def silence(layers: int, many: int = 2) -> Callable[[int], Any]:
    one = lambda n: torch.zeros(layers, n, 6)  # noqa: E731
    return lambda n: (one(n), one(n)) if many == 2 else one(n)


def carried(layers: int, kind: Any = nn.LSTM, **options: Any) -> Workload:
    return networks.workload(
        lambda: Carried(kind, layers, batch_first=True), sentences(7), 5,
        order="sequential", carry=silence(layers, 2 if kind is nn.LSTM else 1), **options,
    )  # fmt: skip


def prove(workload: Workload, workers: int, chunk: int | None = 2, steps: int = 8) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, WavefrontParallel(chunk=chunk), workers=workers, steps=steps)
    assert_equal(proof, by_design=True)


@pytest.mark.parametrize(("workers", "optimizer"), networks.sizes())
def test_equals_one_device(workers: int, optimizer: Any) -> None:
    prove(letters(5, optimizer=optimizer, clip_grad_norm=0.5), workers)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_carried_state_goes_on_from_batch_to_batch(kind: Any, workers: int) -> None:
    prove(carried(3, kind, clip_grad_norm=1.0), workers)


OTHERS = {
    "gru": (3, {"kind": nn.GRU}),
    "rnn_relu": (2, {"kind": nn.RNN, "nonlinearity": "relu"}),
    "rnn_tanh": (2, {"kind": nn.RNN}),
    "projected": (3, {"proj_size": 4}),
    "without_bias": (3, {"bias": False}),
    "gru_without_bias": (2, {"kind": nn.GRU, "bias": False}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_layer_equals_one_device(name: str) -> None:
    layers, options = OTHERS[name]
    prove(letters(layers, **options), 2, steps=4)


class Classifier(nn.Module):
    """Time-major; of sequences one class each, from the last state of the upper layers; the initial state is made in
    the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net, self.out = nn.LayerNorm(4), nn.LSTM(4, 6, 3), nn.Linear(12, 3)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        begun = torch.ones(3, x.size(0), 6, dtype=x.dtype)
        _, (h, c) = self.net(self.norm(x.transpose(0, 1)), (begun, begun * 0.5))
        return self.out(torch.cat([h[-1], c[-2]], 1))


class Tied(nn.Module):
    """One matrix for the words that go in and those that come out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net, self.out = nn.Embedding(WORDS, 6), nn.LSTM(6, 6, 2, batch_first=True), nn.Linear(6, WORDS)
        self.out.weight = self.embed.weight
        self.net.weight_hh_l1.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.net(self.embed(tokens))[0]).transpose(1, 2)


class Masked(nn.Module):
    """Two inputs, of which what comes after the layers takes one; and a batch normalisation there."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.out = nn.LSTM(4, 6, 2, batch_first=True), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, weights: Tensor, scale: float = 0.5, state: Any = None) -> Tensor:
        h = self.net(self.drop(x), state)[0] * weights.unsqueeze(2) * scale
        return self.out(self.norm(h.sum(1)))


class Pairs(networks.Dataset[Any]):
    def __len__(self) -> int:
        return 17  # three batches of five and one of two: a normalisation refuses a single row

    def __getitem__(self, i: int) -> Any:
        return (networks.numbers(7, 4, seed=i), networks.numbers(7, seed=99 + i)), i % 3


def classified(n: int = 16) -> TensorDataset:
    return TensorDataset(networks.numbers(n, 7, 4), networks.classes(n, 3))


MODELS: dict[str, Callable[[], Workload]] = {
    "from_the_last_states": lambda: networks.workload(Classifier, classified, 5),
    "tied_and_frozen_weights": lambda: networks.workload(Tied, sentences(7), 5, optimizer=adam, clip_grad_norm=0.5),
    "two_inputs_and_a_normalisation": lambda: networks.workload(Masked, Pairs, 5, steps=6),
    "the_layers_alone": lambda: networks.workload(
        lambda: nn.LSTM(4, 3, 2, batch_first=True),
        lambda: TensorDataset(networks.numbers(16, 7, 4), networks.numbers(16, 7, 3)),
        5, loss=lambda outputs, targets: F.mse_loss(outputs[0], targets) + outputs[1][1].square().mean(),
    ),
    "tokens_counted": lambda: networks.workload(
        lambda: Letters(nn.LSTM, 2, batch_first=True), lambda: networks.padded(16), 5, count=networks.real_tokens,
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=-1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_around_the_layers_equals_one_device(name: str, workers: int) -> None:
    prove(MODELS[name](), workers)


def test_dropout_between_layers_is_named_and_the_rest_is_equal() -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(letters(3, dropout=0.5), WavefrontParallel(chunk=3), workers=2, steps=3)
    assert proof.holds
    assert any("dropout=0.5" in line for line in proof.by_design)


def test_the_runs_own_precision_differs_by_its_own_rounding() -> None:
    workload = replace(letters(3, time=12, rows=4), precision="float32")
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, WavefrontParallel(), workers=2, steps=6)
    wide, own = proof.rounds
    assert wide.worst.absolute <= EXACT
    assert own.precision == "float32"
    assert own.verdict == "equal", own


@settings(max_examples=6, deadline=None)
@given(
    workers=st.integers(2, 4),
    more=st.integers(0, 2),
    time=st.integers(1, 9),
    rows=st.integers(1, 5),
    chunk=st.none() | st.integers(1, 10),
    rows_first=st.booleans(),
)
@pytest.mark.thorough
def test_any_shape_equals_one_device(
    workers: int, more: int, time: int, rows: int, chunk: int | None, rows_first: bool
) -> None:
    def model() -> nn.Module:
        return Letters(nn.LSTM, workers + more, batch_first=True) if rows_first else Turned(workers + more)

    workload = networks.workload(model, sentences(time, rows), rows, optimizer=adam)
    prove(workload, workers, chunk, steps=3)


class Turned(Letters):
    """The same, time-major inside."""

    def __init__(self, layers: int) -> None:
        super().__init__(nn.LSTM, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        h, _ = self.net(self.embed(tokens.t()))
        return self.out(h).permute(1, 2, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", [networks.momentum, adam])
@pytest.mark.parametrize("chunk", [None, 3, 20])
@pytest.mark.parametrize("layers", [4, 6])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_wide_grid_equals_one_device(
    kind: Any, workers: int, layers: int, chunk: int | None, optimizer: Any
) -> None:
    prove(letters(layers, kind=kind, optimizer=optimizer), workers, chunk)
    prove(carried(layers, kind, optimizer=optimizer), workers, chunk)


# One layer


def references(net: nn.RNNBase, x: Tensor, begun: list[Tensor], dy: Tensor, dstate: list[Tensor]) -> dict[str, Tensor]:
    """What torch computes of a whole layer."""
    x = x.clone().requires_grad_()
    state = [t.unsqueeze(0) for t in begun]
    y, ended = net(x, tuple(state) if len(state) == 2 else state[0])
    ended = [t[0] for t in (ended if isinstance(ended, tuple) else (ended,))]
    torch.autograd.backward([y, *ended], [dy, *dstate])
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return found | {"y": y.detach(), "dx": x.grad} | {f"state{i}": t.detach() for i, t in enumerate(ended)}


def in_chunks(
    own: RecurrentLayer, x: Tensor, begun: list[Tensor], dy: Tensor, dstate: list[Tensor], length: int
) -> Any:
    """The same of a layer, chunk by chunk; twice, since memory is kept."""
    for _ in range(2):
        for p in own.weights:
            p.grad = None
        y, dx = torch.empty_like(dy), torch.empty_like(x)
        pieces = chunks(len(x), length)
        own.begin_pass(x, y, tuple(begun), training=True)
        for piece in pieces:
            own.forward(piece)
        ended = own.state
        own.begin_backward(dstate)
        for piece in reversed(pieces):
            own.backward(piece, dy[piece], dx[piece])
        own.finish()
    found = {name: p.grad for name, p in zip(own.names, own.weights, strict=True) if p.grad is not None}
    return found | {"y": y, "dx": dx} | {f"state{i}": t for i, t in enumerate(ended)}


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["lstm", "own_lstm", "gru", "rnn", "projected"]),
    time=st.integers(1, 8),
    rows=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 6), st.integers(2, 7)),
    length=st.integers(1, 9),
    bias=st.booleans(),
)
def test_a_layer_in_chunks_is_the_whole_layer(
    mode: str, time: int, rows: int, widths: tuple[int, int], length: int, bias: bool
) -> None:
    kind = {"gru": nn.GRU, "rnn": nn.RNN}.get(mode, nn.LSTM)
    options = {"proj_size": 1} if mode == "projected" else {}
    net = kind(*widths, bias=bias, dtype=torch.float64, **options)
    outputs = net.proj_size or net.hidden_size
    sizes = [outputs, net.hidden_size][: 2 if kind is nn.LSTM else 1]
    x, dy = networks.numbers(time, rows, widths[0]), networks.numbers(time, rows, outputs, seed=1)
    begun = [networks.numbers(rows, n, seed=2 + i) for i, n in enumerate(sizes)]
    dstate = [networks.numbers(rows, n, seed=4 + i) for i, n in enumerate(sizes)]
    own = LSTMLayer(net, 0) if mode == "own_lstm" else TorchLayer(net, 0)
    expected = references(net, x, begun, dy, dstate)
    found = in_chunks(own, x, begun, dy, dstate, length)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-12, name


@given(time=st.integers(1, 300), rows=st.integers(1, 300), ranks=st.integers(1, 8), layers=st.integers(1, 8))
def test_chunks_cover_the_time_and_their_length_follows_the_rule(time: int, rows: int, ranks: int, layers: int) -> None:
    for short in (True, False):
        length = chunk_length(time, rows, ranks, layers, short=short)
        assert 1 <= length <= time
        assert length == time or length * rows >= 128
        pieces = chunks(time, length)
        assert [t for piece in pieces for t in range(time)[piece]] == list(range(time))
    assert chunk_length(128, 32, 2, 1, short=True) == 8
    assert chunk_length(128, 32, 2, 1, short=False) == 16
    assert chunk_length(128, 16, 2, 4, short=True) == 32


# What goes on elsewhere, and what comes out


def go_on(world: World, workload: Workload, strategy: Any, states: list[State], steps: int) -> State:
    step = strategy.build(workload, world)
    start = 0
    if states:
        step.load_state_dict(states[-1])
        start = states[-1].step
    for number in range(start, start + steps):
        step(step.source.at(number, step.data_shard))
    state = step.state_dict()
    assert state.model.keys() == workload.model().state_dict().keys()
    return state


def test_a_state_goes_on_at_any_number_of_workers_and_under_another_strategy() -> None:
    workload = carried(4, optimizer=adam)
    ours, theirs = WavefrontParallel(chunk=2), DataParallel()
    with by_value(networks):
        whole = on_ranks(go_on, 1, workload, theirs, [], 8)[0]
        first = on_ranks(go_on, 3, workload, ours, [], 2)[1]
        second = on_ranks(go_on, 2, workload, theirs, [first], 2)[0]
        third = on_ranks(go_on, 4, workload, ours, [second], 2)[3]
        last = on_ranks(go_on, 2, workload, ours, [third], 2)[0]
    left, right = dict(last.tensors()), dict(whole.tensors())
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert (left[name] - tensor).abs().max() <= 1e-12, name
    assert last.settings == whole.settings


def outputs_of(world: World, workload: Workload, strategy: Any) -> list[Tensor]:
    """Of a training step, then evaluation, then the step again: neither disturbs the other."""
    step = strategy.build(workload, world)
    step(step.source.at(0, step.data_shard))
    source = BatchSource.of_evaluation(workload, dtype=torch.float64)
    share = DataShard() if isinstance(strategy, WavefrontParallel) else step.data_shard
    told = [step.predict(source.at(number, share)) for number in range(len(source))]
    step(step.source.at(1, step.data_shard))
    return [t.clone() for t in told if t is not None] + list(step.state_dict().model.values())


@pytest.mark.parametrize("state", [True, False])
def test_outputs_in_evaluation_are_those_of_one_device_and_change_nothing(state: bool) -> None:
    made = carried(3) if state else letters(3, dropout=0.0)
    evaluation = apportion.Evaluation(data=sentences(7), metrics={"loss": F.cross_entropy}, batch_size=4)
    workload = replace(made, evaluation=evaluation)
    with by_value(networks):
        (alone,) = on_ranks(outputs_of, 1, workload, DataParallel())
        answers = on_ranks(outputs_of, 2, workload, WavefrontParallel(chunk=2))
    many = len(answers[1]) - len(answers[0])
    assert abs(many) == math.ceil(16 / 4), "one rank has the outputs"
    found = max(answers, key=len)
    assert len(found) == len(alone)
    for left, right in zip(found, alone, strict=True):
        assert (left - right).abs().max() <= 1e-12


def held(world: World) -> list[str]:
    step = WavefrontParallel().build(letters(3), world)
    return list(step.model.state_dict())


def test_each_rank_holds_its_own_layers_alone() -> None:
    with by_value(networks):
        first, second = on_ranks(held, 2)
    assert {name.split("_l")[-1] for name in first if name.startswith("net.")} == {"0", "2"}
    assert {name.split("_l")[-1] for name in second} == {"1"}
    assert {name for name in first if not name.startswith("net.")} == {"embed.weight", "out.weight", "out.bias"}


# What a death costs


def dying(rank: int, where: str, mark: Path) -> Workload:
    """Adam on four layers; a rank kills itself once, in the loss (which the last one computes while the others wait)
    or in its fourth update."""

    def die(step: int) -> None:
        if mark.name != "never" and int(os.environ["LOCAL_RANK"]) == rank and step == 4 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if where == "loss":
            die(len(calls))
        return F.cross_entropy(outputs, targets)

    def schedule(optimizer: Any, steps: int) -> Any:
        trains = any(p.numel() > 1 for group in optimizer.param_groups for p in group["params"])

        def factor(step: int) -> float:
            if where == "update" and trains:  # and is not only followed ahead, on a copy of the optimizer
                die(step)
            return 1.0 / (1 + step)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    return letters(4, optimizer=adam, loss=loss, schedule=schedule, clip_grad_norm=0.5)


def trained(workload: Workload, run_dir: Path) -> dict[str, Tensor]:
    with by_value(networks), by_value(sys.modules[__name__]):
        local = Local(workers=2, threads=1, device="cpu")
        apportion.train(workload, WavefrontParallel(chunk=2), launcher=local, run_dir=run_dir)
    folder = run_dir / "checkpoints" / "latest"
    return {n: t for part in ("model", "optimizer") for n, t in load_file(folder / f"{part}.safetensors").items()}


@pytest.mark.parametrize(("rank", "where"), [(1, "loss"), (0, "update"), (1, "update")])
def test_a_death_leaves_no_trace(rank: int, where: str, tmp_path: Path) -> None:
    expected = trained(dying(rank, where, tmp_path / "never"), tmp_path / "undisturbed")
    found = trained(dying(rank, where, tmp_path / "died"), tmp_path / "disturbed")
    assert (tmp_path / "died").exists()
    assert [e.kind for e in read_events(tmp_path / "disturbed")].count("fault") == 1
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# What is refused


class Branching(Letters):
    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        if h.sum() > 0:
            h = h * 2
        return self.out(self.net(h)[0])


class Around(Letters):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.out(self.net(x)[0] + x.sum(2, keepdim=True))


class Learned(Letters):
    def __init__(self) -> None:
        super().__init__(nn.LSTM, 2)
        self.begun = nn.Parameter(torch.zeros(2, 5, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.net(self.embed(tokens), (self.begun, self.begun))[0])


class Packed(Letters):
    def forward(self, tokens: Tensor) -> Tensor:
        lengths = torch.full((5,), 7)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        return self.out(nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True)[0])


class TwoNets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.LSTM(4, 4), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x)[0])[0]


class Often(Letters):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.out(self.net(x)[0] + self.net(-x)[0])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.cell(x[:, 0])
        return h


class Own(nn.LSTM):
    pass


class StateOfOutputs(Letters):
    def forward(self, tokens: Tensor, state: Any) -> Any:  # type: ignore[override]
        h, _ = self.net(self.embed(tokens), state)
        return self.out(h), h[-1]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branching": (lambda: Branching(nn.LSTM, 2), "Branching cannot be traced.*use data_parallel"),
    "around": (lambda: Around(nn.LSTM, 2), "embed comes before net, and what comes after takes its outputs too"),
    "learned": (Learned, "the state that net begins in goes through begun"),
    "packed": (lambda: Packed(nn.LSTM, 2, batch_first=True), "different lengths .a PackedSequence.*data_parallel"),
    "two": (TwoNets, "lower and upper are recurrent modules apart.*num_layers=2.*layer_placement"),
    "often": (lambda: Often(nn.LSTM, 2), "net is called 2 times"),
    "cells": (Cells, "cell is called moment by moment.*use nn.LSTM"),
    "own": (lambda: nn.Sequential(Own(4, 4, 2)), "0 is a Own of your own.*use data_parallel"),
    "bidirectional": (lambda: Letters(nn.LSTM, 2, bidirectional=True), "net is bidirectional.*data_parallel"),
    "none": (networks.perceptron, "no nn.LSTM, nn.GRU or nn.RNN.*pipeline_parallel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        cut(make(), networks.classes(5, WORDS, 7), carry=None)


def test_a_state_made_of_outputs_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="is made of the outputs of net"):
        cut(StateOfOutputs(nn.LSTM, 2), networks.classes(5, WORDS, 7), carry=lambda rows: torch.zeros(rows, 2, 8))


def test_what_a_workload_asks_for_in_vain_is_refused_by_name() -> None:
    alone = World()
    with pytest.raises(ValueError, match='precision="float32", or data_parallel'):
        WavefrontParallel().build(replace(letters(2), precision="bfloat16"), alone)
    with pytest.raises(ValueError, match="update= asks for the gradient"):
        WavefrontParallel().build(replace(letters(2), loss=None, update=lambda step, batch: {}), alone)
    with pytest.raises(ValueError, match="chunk=0 must be"):
        WavefrontParallel(chunk=0)
    few = pytest.raises(ValueError, match=r"net has num_layers=2.*workers<=2")
    with by_value(networks), by_value(sys.modules[__name__]), few:
        apportion.check(letters(2), "wavefront_parallel", workers=3, steps=1)


def test_a_model_is_left_as_it_was_by_being_traced() -> None:
    model = MODELS["two_inputs_and_a_normalisation"]().model()
    model.get_submodule("norm").eval()
    sample = (networks.numbers(5, 7, 4).float(), networks.numbers(5, 7).float())
    found = cut(model, sample, carry=None)
    assert model.training
    assert not model.get_submodule("norm").training
    assert found.path == "net"


def test_the_kernel_is_chosen_by_what_a_layer_is() -> None:
    assert isinstance(layer(nn.GRU(3, 3), 0), TorchLayer)
    assert isinstance(layer(nn.LSTM(3, 3, proj_size=2), 0), TorchLayer)


@pytest.mark.thorough
def test_the_example_equals_one_device_on_a_smaller_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "examples"), *sys.path])
    import char_lstm  # type: ignore[import-not-found]

    monkeypatch.setattr(char_lstm, "HIDDEN", 8)
    monkeypatch.setattr(char_lstm, "LENGTH", 11)
    monkeypatch.setattr(char_lstm, "text", lambda: char_lstm.made_up()[:2000])
    workload = replace(char_lstm.workload, batch_size=6, precision="float64")
    with by_value(char_lstm):
        proof = apportion.check(workload, WavefrontParallel(), workers=3)
    assert proof.rounds[0].worst.absolute <= EXACT
    assert proof.holds

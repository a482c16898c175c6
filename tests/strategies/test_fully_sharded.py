"""fully_sharded: the network of one device, with its weights spread over the ranks, and a state that any strategy takes
up."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from killed import saved
from proofs import EXACT, assert_equal
from ranks import apart, by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Policy, Workload
from apportion.comm.world import World
from apportion.core.strategy import Held, State, Strategy
from apportion.errors import ApportionError, WorkerFailed
from apportion.runtime.launch.local import Local
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.single_device import SingleDevice

EACH = FullySharded(min_num_params=1)
"""Every layer travels by itself."""
WORKLOADS = Path(__file__).parents[1] / "helpers" / "fault_workloads.py"
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


def prove(workload: Workload, strategy: Strategy, workers: int, steps: int = 5) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    assert_equal(proof)


# Exactness, layer by layer


class Attending(nn.Module):
    """Layers that torch composes, some of which use the weights of their parts without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(tokens)).mean(1))


def attending(batch_size: int) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 11, 5), networks.classes(n, 3))  # noqa: E731
    return networks.workload(Attending, data, batch_size)


def frozen_layer(batch_size: int) -> Workload:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
        made[2].requires_grad_(False)
        return made

    return networks.workload(model, networks.tabular(batch_size, 10), batch_size)


class InPlace(nn.Module):
    """Layers whose outputs are views, and are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += 0.5
        h = h * h
        g = self.second(h)
        g += h
        g.relu_()
        return self.out(g).mean(1)


def in_place(batch_size: int) -> Workload:
    return networks.workload(InPlace, networks.tabular(batch_size, 5, 4), batch_size)


def weight_norm(batch_size: int) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(10, 9)), nn.Tanh(), nn.Linear(9, 3))

    return networks.workload(model, networks.tabular(batch_size, 10), batch_size)


CASES: dict[str, Callable[[int], Workload]] = {
    **networks.cases, "attending": attending, "frozen_layer": frozen_layer, "weight_norm": weight_norm,
    "in_place": in_place,
}  # fmt: skip
LAYERS = (
    "mlp", "cnn", "batch_norm_2d", "batch_norm_cumulative", "coupled_examples", "tied_weights", "carried_state",
    "few_lanes", "counted_tokens", "a_shard_without_loss_terms", "class_weights", "clipped", "adam", "one_cycle",
    "parameter_groups", "parameters_without_optimizer", "buffers", "large_parameters", "attending", "frozen_layer",
    "weight_norm", "own_collate", "in_place",
)  # fmt: skip


ALWAYS = (
    "mlp", "batch_norm_2d", "coupled_examples", "tied_weights", "carried_state", "clipped", "attending", "frozen_layer",
    "weight_norm", "in_place", "RMSprop", "fused Adam",
)  # fmt: skip


def mostly_slow(names: Iterable[str]) -> list[object]:
    """These few always, the rest when asked for."""
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mostly_slow(LAYERS))
def test_layers_gathered_one_by_one_change_nothing(name: str) -> None:
    """At 3 ranks: some have no row of the last batch, and no row of a narrow layer."""
    prove(CASES[name](61), EACH, 3)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_it_is_the_network_of_one_device_at_any_number_of_workers(workers: int) -> None:
    prove(networks.cases["batch_norm_2d"](61), EACH, workers, networks.STEPS)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS))
def test_every_elementwise_optimizer_updates_shards_as_it_updates_whole_weights(name: str) -> None:
    smooth = lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))  # noqa: E731
    workload = replace(networks.cases["mlp"](61), model=smooth, optimizer=OPTIMIZERS[name])
    prove(workload, EACH, 2)


@pytest.mark.parametrize(
    ("workers", "microbatches"),
    [(2, 4), (3, 100), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, 3), (3, 2)))],
)
@pytest.mark.parametrize("name", ["mlp", "counted_tokens_without_norm", "carried_state"])
def test_microbatches_change_nothing(name: str, workers: int, microbatches: int) -> None:
    """Ranks with fewer rows than others have fewer parts, and still gather every layer as often."""
    prove(networks.cases[name](7), FullySharded(min_num_params=1, microbatches=microbatches), workers, networks.STEPS)


def test_bfloat16_differs_by_its_own_rounding() -> None:
    made = networks.cases["mlp"](61)
    narrow = lambda: TensorDataset(*(t.float() if t.is_floating_point() else t for t in made.data().tensors))  # type: ignore[attr-defined] # noqa: E731
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(replace(made, data=narrow, precision="bfloat16"), EACH, workers=2, steps=5)
    assert proof.holds
    assert proof.rounds[1].worst.relative < 3e-2


def told(world: World, workload: Workload, strategy: Strategy) -> list[float]:
    step = strategy.build(workload, world)
    assert step.data_shard is not None
    return [step(step.source.at(n, step.data_shard))["loss"].item() for n in range(networks.STEPS)]


@pytest.mark.parametrize("name", ["counted_tokens", "a_shard_without_loss_terms", "coupled_examples"])
def test_the_losses_told_are_those_of_one_device_on_every_rank(name: str) -> None:
    workload = networks.cases[name](61)
    with by_value(networks):
        (alone,) = on_ranks(told, 1, workload, SingleDevice())
        for losses in on_ranks(told, 3, workload, EACH):
            assert losses == pytest.approx(alone, rel=1e-11)


# Memory


def wide(batch_size: int = 6) -> Workload:
    def model() -> nn.Module:
        layers = [layer for _ in range(6) for layer in (nn.Linear(192, 192), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(192, 3))

    adam = lambda p: torch.optim.Adam(p, lr=0.001)  # noqa: E731
    return networks.workload(model, networks.tabular(batch_size, 192), batch_size, optimizer=adam)


LARGE = 32 << 10


def remembered(world: World, strategy: Strategy) -> tuple[Held, int]:
    """What the step says that it holds after some steps and an evaluation; and what all large tensors of this process
    take."""
    from torch.distributed.tensor import DTensor

    step = strategy.build(wide(), world)
    assert step.data_shard is not None
    for n in range(2):
        step(step.source.at(n, step.data_shard))
    step.predict(step.source.at(2, step.data_shard))
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not issubclass(type(t), DTensor)]
    between = {t.untyped_storage().data_ptr() for t in found if t.dtype == torch.uint8}  # the group's own memory
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return step.held(), sum(n for at, n in blocks.items() if n >= LARGE and at not in between)


@pytest.mark.parametrize("strategy", [EACH, FullySharded()])
@pytest.mark.thorough
def test_what_a_worker_holds_falls_with_the_number_of_workers(strategy: FullySharded) -> None:
    with by_value(networks):
        found = [on_ranks(remembered, n, strategy) for n in (1, 2, 3)]
    whole = found[0][0][0].own
    weights = 6 * (192 * 192 + 192) + 192 * 3 + 3
    assert 3 * 8 * weights <= whole < 3.1 * 8 * weights
    for ranks, answers in enumerate(found, 1):
        assert all(held.shared == 0 for held, _ in answers)
        assert sum(held.own for held, _ in answers) < 1.1 * whole
        assert max(held.own for held, _ in answers) < 1.1 * whole / ranks
    data = 8 * 192 * networks.rows(6)
    tensors = [max(nbytes for _, nbytes in answers) - data for answers in found]
    assert tensors[1] < 0.6 * tensors[0]
    assert tensors[2] < 0.45 * tensors[0]


def test_a_transformer_is_gathered_layer_by_layer_and_shared_weights_together() -> None:
    from apportion.parallel.replica.fsdp import units

    model = Attending()
    assert units(model, 1) == [model.embed, *model.encoder.layers, model.out, model]
    assert units(model, 10**6) == [model]
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert units(tied, 1) == [tied[2], tied]


# The state


def go_on(world: World, strategy: Strategy, workload: Workload, state: State | None, steps: int) -> State:
    step = strategy.build(workload, world)
    if state is not None:
        step.load_state_dict(state)
    for n in range(step.done, step.done + steps):
        assert step.data_shard is not None
        step(step.source.at(n, step.data_shard))
    return step.state_dict()


def named_optimizer(batch_size: int) -> Workload:
    made = networks.cases["adam"](batch_size)
    return replace(made, optimizer=lambda p: {"only": torch.optim.Adam(p, lr=0.01)})


@pytest.mark.parametrize("name", ["batch_norm_2d", "adam", "carried_state", "tied_weights", "one_cycle", "named"])
@pytest.mark.thorough
def test_a_state_goes_on_under_other_strategies_at_any_number_of_workers(name: str) -> None:
    workload = {**networks.cases, "named": named_optimizer}[name](61)
    journey: list[tuple[Strategy, int, int]] = [
        (DataParallel(), 2, 2), (EACH, 3, 2), (FullySharded(), 2, 1), (SingleDevice(), 1, 1), (EACH, 2, 1),
        (DataParallel(), 3, 1),
    ]  # fmt: skip
    with by_value(networks):
        (whole,) = on_ranks(go_on, 1, SingleDevice(), workload, None, 8)
        state = None
        for strategy, workers, steps in journey:
            states = on_ranks(go_on, workers, strategy, workload, state, steps)
            state = states[-1]
            for rank in states:  # every rank gives the same, to the bit
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(rank.tensors(), state.tensors(), strict=True))
    assert state is not None
    found, expected = dict(state.tensors()), dict(whole.tensors())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].double() - tensor.double()).abs().max() <= 1e-12, key
    assert state.settings == whole.settings


def gathered_by_torch(world: World) -> bool:
    """Is the state what torch's own distributed checkpoint gathers?"""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    step = EACH.build(networks.cases["batch_norm_2d"](61), world)
    assert step.data_shard is not None
    step(step.source.at(0, step.data_shard))
    ours = step.state_dict().model
    theirs = get_model_state_dict(step.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return world.rank > 0 or (ours.keys() == theirs.keys() and all(torch.equal(t, ours[k]) for k, t in theirs.items()))


def test_the_weights_are_those_that_torchs_distributed_checkpoint_gathers() -> None:
    with by_value(networks):
        assert on_ranks(gathered_by_torch, 3) == [True] * 3


def on_several_hosts(world: World, over: str, workload: Workload) -> State:
    own = apart(over=over)
    state = go_on(own, EACH, workload, None, 4)
    own.close()
    return state


@pytest.mark.parametrize("over", ["NetworkGroup", "ProcessGroup"])
@pytest.mark.parametrize("name", ["batch_norm_2d", "carried_state", "clipped"])
def test_it_is_the_same_network_where_ranks_share_no_memory(name: str, over: str) -> None:
    workload = networks.cases[name](61)
    with by_value(networks):
        (alone,) = on_ranks(go_on, 1, SingleDevice(), workload, None, 4)
        for state in on_ranks(on_several_hosts, 2, over, workload):
            expected = dict(alone.tensors())
            for key, tensor in state.tensors():
                assert (tensor.double() - expected[key].double()).abs().max() <= 1e-12, key


# What goes wrong


def refused(workload: Workload, strategy: Strategy, told: str, world: World | None = None) -> None:
    with pytest.raises(ValueError, match=told):
        strategy.build(workload, world or World())


def single_number() -> nn.Module:
    model = networks.perceptron()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 3))
    model[0].weight.register_hook(lambda g: g * 2)
    return model


def mixed_types() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3).bfloat16())


def test_what_cannot_be_spread_is_refused_with_the_rule_and_the_cure() -> None:
    mlp = networks.cases["mlp"](61)
    lbfgs = lambda p: torch.optim.LBFGS([q for _, q in p])  # noqa: E731
    adafactor = lambda p: torch.optim.Adafactor([q for _, q in p])  # noqa: E731
    refused(networks.cases["two_optimizers"](61), EACH, "update= asks for gradients of whole parameters.*data_parallel")
    refused(networks.cases["sparse_embeddings"](61), EACH, "embed has sparse gradients.*use sparse=False")
    refused(replace(mlp, compile=True), EACH, "compile=True would compile.*use compile=False, or data_parallel")
    refused(replace(mlp, precision="float16"), EACH, 'float16" scales the loss.*use "bfloat16", or data_parallel')
    refused(replace(mlp, optimizer=lbfgs), EACH, "LBFGS evaluates the loss several times.*map_reduce")
    refused(replace(mlp, optimizer=adafactor), EACH, "Adafactor is not known to update each.*or data_parallel")
    refused(replace(mlp, model=single_number), EACH, r"scale is a single number.*shape \(1,\)")
    refused(replace(mlp, model=hooked), EACH, "0.weight has a hook, which its shards would lose")
    refused(replace(mlp, model=mixed_types, precision="float32"), EACH, "1.bias is torch.bfloat16: use one type")
    refused(networks.cases["mlp"](2), EACH, "batch_size=2 cannot feed 3 workers", World(size=3))
    one_more = World(size=9, local_size=torch.cuda.device_count() + 1, device=torch.device("cuda", 0))
    refused(mlp, EACH, "workers would share . GPUs.*use workers<=", one_more)


def fused(kind: str, batch_size: int = 61) -> Workload:
    mlp = networks.cases["mlp"](batch_size)
    return replace(mlp, optimizer=lambda p: getattr(torch.optim, kind)([q for _, q in p], lr=0.1, fused=True))


def built(world: World, kind: str) -> str:
    with pytest.raises(ValueError, match="fused") as refusal:
        EACH.build(fused(kind), world)
    return str(refusal.value)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_fused_kernel_for_whole_weights_is_refused_and_runs_where_they_are_whole(kind: str) -> None:
    for told in on_ranks(built, 2, kind):
        assert told.startswith(f"{kind} has fused=True, and torch's fused SGD and Adagrad update whole weights")
        assert told.endswith("use fused=False, Adam or AdamW, or data_parallel")
    step = EACH.build(fused(kind), World())
    batch = step.take()
    assert batch is not None
    step(batch)
    assert step.done == 1


def fused_adam(batch_size: int) -> Workload:
    return fused("Adam", batch_size)


def test_a_fused_kernel_that_knows_shards_is_used() -> None:
    prove(fused_adam(61), EACH, 2)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_single_device_makes_the_fused_updates_that_a_workload_asks_for_itself(kind: str) -> None:
    states = []
    for strategy in (SingleDevice(), SingleDevice(fused=True)):
        step = strategy.build(fused(kind), World())
        for _ in range(3):
            batch = step.take()
            assert batch is not None
            step(batch)
        assert step.state_dict().settings["groups"]
        states.append(step.state_dict().model)
    for name, weights in states[0].items():
        assert torch.equal(weights, states[1][name])


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    from apportion.parallel.replica.fsdp import Sharded

    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(ValueError, match=r"torch 2.*needs a newer torch"):
        Sharded(nn.Linear(2, 2), World(), 1)


def test_microbatches_are_refused_where_they_would_change_the_network() -> None:
    cut = FullySharded(microbatches=2)
    refused(networks.cases["batch_norm_2d"](64), cut, "microbatches=2 would give 1 the statistics of a part.*GroupNorm")
    refused(networks.cases["coupled_examples"](64), cut, "under a loss that couples examples: use microbatches=1")


@pytest.mark.parametrize("parameter", ["min_num_params", "microbatches"])
def test_wrong_parameters_are_refused(parameter: str) -> None:
    with pytest.raises(ValueError, match=f"{parameter}=0 must be a whole number of at least 1"):
        FullySharded(**{parameter: 0})


class Borrowing(nn.Module):
    """The output layer is the embedding's weight, used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embed(tokens).mean(1), self.embed.weight)


def borrowing(batch_size: int) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 7, 4), networks.classes(n, 7))  # noqa: E731
    return networks.workload(Borrowing, data, batch_size)


def test_weights_used_without_their_layer_need_a_larger_unit() -> None:
    with pytest.raises(ValueError, match=r"without calling the layer.*min_num_params= larger"):
        prove(borrowing(61), EACH, 2)
    prove(borrowing(61), FullySharded(), 2)


class Apart(nn.Module):
    """Another layer of the same size on every rank: their messages fit each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.rank = nn.Linear(10, 3), nn.Linear(10, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.left if self.rank else self.right)(x)


def other_layers(world: World, over: str) -> str:
    world = apart(over=over) if over else world
    step = EACH.build(replace(networks.cases["mlp"](61), model=Apart), world)
    step.model.rank = world.rank  # type: ignore[assignment]
    assert step.data_shard is not None
    before = [p.to_local().clone() for p in step.model.parameters()]  # type: ignore[attr-defined]
    try:
        step(step.source.at(0, step.data_shard))
    except ApportionError as error:
        after = [p.to_local() for p in step.model.parameters()]  # type: ignore[attr-defined]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return str(error) if same else "the weights have changed"
    return "nothing"


@pytest.mark.parametrize("over", ["", "NetworkGroup", "ProcessGroup"])
def test_layers_of_one_size_are_not_taken_for_each_other(over: str) -> None:
    with by_value(networks):
        for told in on_ranks(other_layers, 2, over):
            assert "needs every rank to compute the same layers" in told
            assert ("is at layer '" in told) == (over != "ProcessGroup")


def test_a_layer_that_only_some_ranks_compute_is_an_error_and_not_a_wrong_number() -> None:
    workload = networks.cases["frozen_and_unused_parameters"](61)
    with pytest.raises(WorkerFailed, match="needs every rank to compute the same layers; make min_num_params= larger"):
        prove(workload, EACH, 2, networks.STEPS)
    prove(workload, FullySharded(), 2)


# A worker's death


def trained(run_dir: Path, name: str, strategy: Strategy, workers: int, **options: Any) -> apportion.Event:
    launcher = Local(workers=workers, threads=1)
    return apportion.train(f"{WORKLOADS}:{name}", strategy, launcher=launcher, run_dir=run_dir, **options)


@pytest.mark.parametrize(
    ("name", "cause", "then"), [("raises", "boom in the model", DataParallel()), ("killed", "SIGKILL", EACH)]
)
def test_a_dead_worker_ends_the_run_with_its_own_cause_and_any_strategy_goes_on_from_the_checkpoint(
    name: str, cause: str, then: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(checkpoint_every="2 steps")
    mark = tmp_path / "mark"
    monkeypatch.setenv("FAULT_STEP", "8")
    monkeypatch.setenv("FAULT_AFTER", str(tmp_path / "run" / "checkpoints" / "latest"))
    monkeypatch.setenv("FAULT_MARK", str(mark))
    with pytest.raises(WorkerFailed, match=cause) as told:
        trained(tmp_path / "run", name, EACH, 3, policy=policy, steps=12)
    assert time.time() - float(mark.read_text()) < 5
    assert "rank 1" in str(told.value)
    steps = [int(p.name.removeprefix("step-")) for p in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert 0 < max(steps) < 8
    monkeypatch.setenv("FAULT_STEP", "0")
    trained(tmp_path / "whole", name, SingleDevice(), 1, policy=policy, steps=12)
    expected = saved(tmp_path / "whole")
    trained(tmp_path / "run", name, then, 2, resume=True, policy=policy, steps=12)
    found = saved(tmp_path / "run")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].double() - tensor.double()).abs().max() <= EXACT, key

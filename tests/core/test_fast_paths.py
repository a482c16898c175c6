"""Fast paths run only where they are right: nets that autograd treats in an unusual way train as on one device, under
every strategy that has a fast path, or are refused by the name of the layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune
from torch.utils.data import TensorDataset

from apportion import Strategy, Workload, batches
from apportion.comm.world import World
from apportion.core import fast_paths, torch_private
from apportion.parallel.ops.factored_linear import Products, plain_layers
from apportion.parallel.replica.step import OneDeviceStep
from apportion.runtime.worker.job import Job
from apportion.strategies.data_parallel import DataParallel, DataParallelStep
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.tensor_parallel import TensorParallel

EXACT = 1e-10
STEPS, ROWS, WIDTH, KINDS = 5, 12, 6, 3


class Slope(nn.Module):
    """The gradient with respect to the input is a feature of its own; no gradient goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(WIDTH, 10), nn.Linear(10, KINDS)

    def score(self, x: Tensor) -> Tensor:
        y: Tensor = self.above(torch.sigmoid(self.below(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.score(leaf).square().sum(), leaf)
        return self.score(x + slope)


class Twice(Slope):
    """The slope is part of what is trained: a gradient of a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.score(leaf).sum(), leaf, create_graph=True)
        return self.score(x) + slope[:, :KINDS]


class Inner(Slope):
    """Weights that were moved one step along a gradient of their own stand in for the layer's."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = dict(self.below.named_parameters())
            loss = torch.func.functional_call(self.below, own, (torch.ones(2, WIDTH).to(x),)).square().mean()
            moved = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(own.items(), moved, strict=True)}
        y: Tensor = self.above(torch.tanh(torch.func.functional_call(self.below, fast, (x,))))
        return y


class Transformed(Slope):
    """Slopes of each example, by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.score(row).square().sum()))(x)
        return self.score(x) + slopes[:, :KINDS]


class Freezing(Slope):
    """The upper layer stands still for two steps in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        self.above.weight.requires_grad_(int(self.seen) not in (2, 3))
        return self.score(x)


class Half(Slope):
    """A layer is called twice, and its weight gets a gradient from the second call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(WIDTH, WIDTH)
        self.above = nn.Linear(WIDTH, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        self.below.weight.requires_grad_(False)
        x = torch.tanh(self.below(x))
        self.below.weight.requires_grad_(True)
        return self.score(x)


class Hooked(Slope):
    """A hook that comes with each forward and doubles what the weight gets: linear, so it commutes with the sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.score(x)
        if y.requires_grad:
            handle = self.below.weight.register_hook(lambda g: g * 2)
            y.register_hook(lambda g: None)
            self._handles = [*getattr(self, "_handles", [])[-1:], handle]
            for old in self._handles[:-1]:
                old.remove()
        return y


class LookedUp(nn.Module):
    """A table that is looked up by a function, with sparse gradients, and no layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))
        self.above = nn.Linear(8, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.above(functional.embedding(x[:, 0].abs().mul(5).long() % 9, self.table, sparse=True))
        return y


class Phases(nn.Module):
    """Complex weights, by a parameter of its own and by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 8, dtype=torch.complex64) * 0.3)
        self.mix = nn.Linear(8, 8, dtype=torch.complex64)
        self.above = nn.Linear(8, KINDS)
        self.register_buffer("shift", torch.full((8,), 1j))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.above((self.mix(x.to(self.turn.dtype) @ self.turn) + self.shift).abs())
        return y


class OneMemory(nn.Module):
    """Two parameters, one memory; the second is the first one turned."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.back = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.above = nn.Linear(WIDTH, KINDS)
        self.back.weight.data = self.below.weight.data.t()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.above(torch.tanh(self.back(torch.tanh(self.below(x)))))
        return y


class Rescaling(nn.Module):
    """An embedding that rescales the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.above = nn.Embedding(9, 8, max_norm=0.5), nn.Linear(8, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.above(self.words(x[:, 0].abs().mul(5).long() % 9))
        return y


class Thawing(Slope):
    """The upper layer is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.above.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        self.above.requires_grad_(int(self.seen) > 2)
        return self.score(x)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, KINDS))


def pruned() -> nn.Module:
    layer = nn.Linear(WIDTH, 8)
    prune.random_unstructured(layer, "weight", 0.4)
    return stack(layer)


def normalised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return stack(nn.utils.weight_norm(nn.Linear(WIDTH, 8)))


def parametrised() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return stack(nn.Linear(WIDTH, 8), layer)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LazyLinear(KINDS))


NETS: dict[str, Callable[[], nn.Module]] = {
    "slope": Slope,
    "twice": Twice,
    "inner": Inner,
    "transformed": Transformed,
    "freezing": Freezing,
    "half": Half,
    "hooked": Hooked,
    "looked_up": LookedUp,
    "phases": Phases,
    "one_memory": OneMemory,
    "pruned": pruned,
    "normalised": normalised,
    "parametrised": parametrised,
    "rescaling": Rescaling,
    "thawing": Thawing,
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)  # momentum would be sparse, which no checkpoint holds


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def rows() -> TensorDataset:
    draws = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS * STEPS - 5, WIDTH, generator=draws), torch.arange(ROWS * STEPS - 5) % KINDS)


def workload(net: str, *, precision: str = "float64", optimizer: Callable[[Any], Any] | None = None) -> Workload:
    return Workload(
        model=NETS[net], data=rows, loss=functional.cross_entropy,
        optimizer=optimizer or (plain_sgd if net == "looked_up" else sgd), batch_size=ROWS, steps=STEPS,
        precision=precision,
    )  # fmt: skip


State = dict[str, Tensor]


def trained(world: World, strategy: Strategy, made: list[Workload], plain: tuple[str, ...] = ()) -> list[State | str]:
    """What each workload's training leads to, or why there is none."""
    found: list[State | str] = []
    for one in made:
        try:
            with fast_paths.switched_off(*plain):
                step = strategy.build(one, world)
            for batch in batches(step):
                step(batch)
            state = step.state_dict()
            step.close()
            found.append({**state.model, **state.optimizer})
        except ValueError as error:
            found.append(str(error))
    return found


def alone(one: Workload) -> State:
    step = OneDeviceStep(one, torch.device("cpu"), alone=True)
    for batch in batches(step):
        step(batch)
    state = step.state_dict()
    return {**state.model, **state.optimizer}


def assert_same(found: State | str, expected: State, what: str, bound: float = EXACT) -> None:
    assert not isinstance(found, str), f"{what}: {found}"
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        other, value = (t.to_dense() if t.layout is not torch.strided else t for t in (found[name], value))
        assert other.dtype == value.dtype, f"{what}: {name}"
        assert (other - value).abs().max() <= bound, f"{what}: {name} differs by {(other - value).abs().max()}"


IN_STAGES = dict.fromkeys(("slope", "freezing", "half", "thawing"), "so it cannot be cut into stages")
IN_STAGES |= dict.fromkeys(("twice", "inner", "transformed"), "differentiates a gradient")
IN_STAGES |= {"one_memory": "below.weight and back.weight are two parameters"}
IN_ROWS = {"rescaling": "words has max_norm=0.5", "thawing": "above.weight was frozen"}
IN_PARTS = dict.fromkeys(("freezing", "thawing"), "would change the buffer seen more than once")
IN_SLICES = {
    "thawing": IN_ROWS["thawing"], **dict.fromkeys(("twice", "inner", "transformed"), "differentiates a gradient"),
    "one_memory": "below.weight and back.weight are two parameters",
}  # fmt: skip
IN_SHARDS = {
    **IN_ROWS, "phases": "weights of one type travel together", "looked_up": "the gradient of table is sparse",
    "one_memory": "below.weight and back.weight are two parameters",
}  # fmt: skip
GRID: list[tuple[Strategy, int, dict[str, str]]] = [
    (DataParallel(), 2, IN_ROWS),
    (MapReduce(), 2, IN_ROWS),
    (PipelineParallel(microbatches=3), 1, IN_PARTS),
    (PipelineParallel(microbatches=3), 2, {**IN_STAGES, **IN_PARTS}),
    (LayerPlacement(), 2, IN_STAGES),
    (TensorParallel(), 2, IN_SLICES),
    (FullySharded(), 2, IN_SHARDS),
]


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "ranks", "refused"), GRID, ids=[f"{s}-{n}" for s, n, _ in GRID])
def test_a_net_trains_as_on_one_device_or_is_refused(strategy: Strategy, ranks: int, refused: dict[str, str]) -> None:
    prove(strategy, ranks, refused, NETS)


def prove(strategy: Strategy, ranks: int, refused: dict[str, str], nets: Iterable[str], **options: Any) -> None:
    plain, nets = options.pop("plain", ()), list(nets)
    made = [workload(net, **options) for net in nets]
    every = on_ranks(trained, ranks, strategy, made, plain)
    for net, one, *results in zip(nets, made, *every, strict=True):
        expected = alone(one) if net not in refused else {}
        for found in results:
            if net in refused:
                assert isinstance(found, str), f"{net} is not refused"
                assert refused[net] in found
            else:
                assert_same(found, expected, f"{strategy} {net}")


def test_a_layer_without_a_shape_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"2 \(LazyLinear\) has no shape before its first call"):
        OneDeviceStep(replace(workload("slope"), model=lazy), torch.device("cpu"))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, KINDS))


def test_a_network_without_values_is_refused_by_the_name_of_a_weight() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device and has no values"):
        OneDeviceStep(replace(workload("slope"), model=on_meta), torch.device("cpu"))


@pytest.mark.processes
def test_replicas_that_are_averaged_are_those_of_their_reference() -> None:
    nets = ["slope", "twice", "half", "looked_up", "phases", "pruned", "normalised", "one_memory"]
    made = [replace(workload(net), steps=6, epochs=None) for net in nets]
    strategy = LocalSgd(every=2)
    found, _ = on_ranks(trained, 2, strategy, made)
    for net, one, result in zip(nets, made, found, strict=True):
        *_, last = strategy.reference(one, 2)
        assert not isinstance(result, str), result
        for name, value in last.model.items():
            assert (result[name] - value).abs().max() <= EXACT, f"{net}: {name}"


@pytest.mark.processes
@pytest.mark.parametrize("plain", [*[(path,) for path in fast_paths.ALL], fast_paths.ALL], ids=",".join)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_the_plain_paths_train_the_same_network(plain: tuple[str, ...], optimizer: Callable[[Any], Any]) -> None:
    prove(DataParallel(), 2, {}, ["slope", "freezing", "half"], plain=plain, optimizer=optimizer)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [PipelineParallel(microbatches=3), TensorParallel()], ids=str)
def test_a_network_in_parts_trains_the_same_by_plain_paths(strategy: Strategy) -> None:
    prove(strategy, 2, {}, ["pruned", "parametrised"], plain=fast_paths.ALL, optimizer=adam)


def chosen_paths(world: World, plain: tuple[str, ...]) -> tuple[bool, int]:
    """Do the weights lie in shared pages, and how many layers are redirected?"""
    with fast_paths.switched_off(*plain):
        step = DataParallelStep(workload("slope"), world, 1)
    step.close()
    return step.gradient_update.shared_memory is not None, sum(
        type(m).__name__ == "_Redirected" for m in step.model.modules()
    )


@pytest.mark.processes
def test_a_path_that_is_switched_off_is_not_taken() -> None:
    assert on_ranks(chosen_paths, 2, ()) == [(True, 2)] * 2
    assert on_ranks(chosen_paths, 2, ("linear",)) == [(True, 0)] * 2
    assert on_ranks(chosen_paths, 2, ("pages",)) == [(False, 0)] * 2


def test_paths_are_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_paths.chosen() == ()
    monkeypatch.setenv(fast_paths.VARIABLE, "fused, linear")
    assert fast_paths.chosen() == ("linear", "fused")
    monkeypatch.setenv(fast_paths.VARIABLE, "linear,pagse")
    with pytest.raises(ValueError, match="'pagse' is not a fast path; name some of linear, pages, fused, early"):
        fast_paths.chosen()


def test_a_job_takes_along_what_is_switched_off() -> None:
    with fast_paths.switched_off("pages"):
        job = Job(workload=workload("slope"), strategy=DataParallel())
    assert job.plain == ("pages",)
    assert fast_paths.chosen() == ()
    try:
        job.open()
        assert fast_paths.chosen() == ("pages",)
    finally:
        fast_paths.switch_off(())


@pytest.mark.processes
def test_weights_in_one_memory_stay_in_it() -> None:
    one = workload("one_memory", precision="float32")
    for (found,) in on_ranks(trained, 2, DataParallel(), [one]):
        assert_same(found, alone(one), "one_memory", 1e-5)
        assert torch.equal(found["below.weight"], found["back.weight"].t())


# A layer whose gradient goes elsewhere


def redirected() -> tuple[nn.Linear, nn.Linear, Products]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    layer = copy.deepcopy(plain)
    return plain, layer, Products(plain_layers(nn.Sequential(layer)))


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_that_is_handed_out_is_not_accumulated(create_graph: bool) -> None:
    plain, layer, products = redirected()
    x = torch.randn(5, 4, dtype=torch.float64)
    for wanted in (("weight",), ("bias",), ("weight", "bias")):
        found = []
        for one in (plain, layer):
            asked = [getattr(one, name) for name in wanted]
            found.append(torch.autograd.grad(one(x).square().sum(), asked, create_graph=create_graph))
        torch.testing.assert_close(*found)
        products.add_up()
        assert layer.weight.grad is None
    for one in (plain, layer):
        one(x).square().sum().backward(inputs=[one.weight])
    products.add_up()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    assert layer.bias.grad is None


def test_a_copy_of_a_redirected_layer_is_an_ordinary_one() -> None:
    _, layer, products = redirected()
    other = copy.deepcopy(layer)
    assert type(other) is nn.Linear
    other(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    products.add_up()
    assert other.weight.grad is not None
    assert layer.weight.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of forward mode
def test_derivatives_in_forward_mode_and_a_weight_in_place_of_another_are_torchs() -> None:
    plain, layer, products = redirected()
    x, tangent = torch.randn(2, 5, 4, dtype=torch.float64)
    found = [torch.func.jvp(one, (x,), (tangent,)) for one in (plain, layer)]
    torch.testing.assert_close(*found)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        assert torch.equal(layer(dual), plain(dual))
    weights = {"weight": layer.weight * 2}
    torch.func.functional_call(layer, weights, (x,)).sum().backward()
    products.add_up()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, 2 * x.sum(0).expand(3, 4))


def test_complex_layers_are_not_redirected() -> None:
    assert plain_layers(nn.Sequential(nn.Linear(4, 3, dtype=torch.complex128))) == []


def test_a_torch_that_was_not_tested_is_named() -> None:
    assert torch_private.missing == []
    assert torch_private.unfamiliar("2.13.0+cpu") is None
    said = "torch 2.14.1 is not one of the tested versions (2.9 to 2.13)"
    assert torch_private.unfamiliar("2.14.1") == said

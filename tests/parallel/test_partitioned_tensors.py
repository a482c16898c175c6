"""Tensors of split networks: any number of dimensions, changes in place, any strides in a message and a checkpoint."""

from __future__ import annotations

import sys

import networks
import pytest
import torch
from proofs import assert_equal
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.group import broadcast_tensors
from apportion.comm.world import World
from apportion.parallel.ops.matmul import LARGE, SMALL, linear
from apportion.parallel.pipeline.transfer import StageReceiver, StageSender
from apportion.parallel.tensor.linear import is_transposed

pytestmark = pytest.mark.processes

WIDTH = 256
assert SMALL <= WIDTH * WIDTH < LARGE


@pytest.mark.parametrize("shape", [(), (3,), (100,), (2, 3), (50, 4), (2, 3, 2), (0, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_what_a_linear_layer_gives_may_be_written_to_in_place(shape: tuple[int, ...], bias: bool) -> None:
    found = []
    for function in (linear, F.linear):
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64)
        x = torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
        y = function(x, layer.weight, layer.bias)
        y.mul_(2)
        y += 1
        y[..., 0].mul_(3)
        y.square().sum().backward()
        found.append([y, x.grad, layer.weight.grad, *([layer.bias.grad] if bias else [])])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


class Dims(nn.Module):
    """Linear layers in pairs and alone, on inputs of any dimensions, with changes in place after each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.relu(self.up(x)))
        h += x
        h.mul_(0.5)
        return self.relu(self.last(self.norm(h)))


def dims(*shape: int) -> Workload:
    x = networks.numbers(13, *shape, WIDTH)
    return networks.workload(Dims, lambda: TensorDataset(x, x), 6, loss=F.mse_loss)


@pytest.mark.parametrize(
    ("shape", "strategy"), [((5,), "tensor_parallel"), ((2, 3), "tensor_parallel"), ((17,), "pipeline_parallel")]
)
def test_a_split_network_takes_inputs_of_any_dimensions(shape: tuple[int, ...], strategy: str) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        assert_equal(apportion.check(dims(*shape), strategy, workers=2, steps=3))


def tensors() -> dict[str, Tensor]:
    """One of each kind."""
    base = torch.arange(24, dtype=torch.float32)
    whole = torch.arange(6).to(torch.complex64) * (1 + 2j)
    made = {
        "scalar": torch.tensor(3.5),
        "transposed": base.view(4, 6).t(),
        "expanded": base[:3, None].expand(3, 4),
        "expanded from one": torch.ones(()).expand(1),
        "one place of any stride": base.view(2, 3, 4).permute(0, 2, 1)[:, :1, :1],
        "weights of 1x1 in channels_last": torch.randn(4, 5, 1, 1).to(memory_format=torch.channels_last),
        "as a LayerNorm over channels leaves them": base.as_strided((8, 3, 1, 1), (3, 1, 3, 3)),
        "channels_last": base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "every second": base[::2],
        "nothing": torch.empty(0, 3),
        "nothing, strided": torch.empty(3, 0).t(),
        "complex": whole,
        "conjugate": whole.conj(),
        "imaginary of a conjugate": whole.conj().imag,
        "bool": base > 3,
        "bool, strided": (base > 3).view(4, 6).t(),
        "half": base.to(torch.bfloat16),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "whole numbers": torch.arange(4).flip(0),
    }
    return {name: t.clone() if name == "half" else t for name, t in made.items()}


def exchanged(world: World) -> list[str]:
    """The kinds that arrive as others."""
    torch.manual_seed(0)
    expected, group, wrong = tensors(), world.group(), list[str]()
    found = broadcast_tensors(expected if world.rank == 1 else None, group, source=1)
    wrong += [name for name, t in expected.items() if not _same(found[name], t)]
    for ahead in (False, True):
        if world.rank == 0:
            outlet = StageSender(group, 1, ahead=ahead)
            for _ in range(3):
                outlet.send([dict(expected), 7, None])
            outlet.finish()
        else:
            inlet = StageReceiver(group, 0, torch.device("cpu"), ahead=ahead)
            for _ in range(3):
                received, *rest = inlet.receive()
                wrong += [f"message/{name}" for name, t in expected.items() if not _same(received[name], t)]
                assert rest == [7, None]
            group.barrier() if not ahead else None
        if world.rank == 0 and not ahead:
            group.barrier()
    return wrong


def _same(found: Tensor, expected: Tensor) -> bool:
    alike = found.shape == expected.shape and found.dtype == expected.dtype
    return alike and torch.equal(found.resolve_conj(), expected.resolve_conj().resolve_neg())


def test_a_message_holds_a_tensor_of_any_strides() -> None:
    assert on_ranks(exchanged, 2) == [[], []]


class Strided(nn.Module):
    """Gradients, and so the optimizer's slots, in strides that are not the weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 10, 2, 2), nn.LayerNorm(10)
        self.mix, self.last = nn.Conv2d(10, 12, 1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.last(self.mix(x).relu().mean((2, 3)))


@pytest.mark.parametrize("strategy", ["layer_placement", "pipeline_parallel"])
def test_slots_of_any_strides_are_gathered(strategy: str) -> None:
    x = networks.numbers(13, 3, 8, 8)
    workload = networks.workload(Strided, lambda: TensorDataset(x, networks.classes(13, 3)), 6)
    with by_value(networks), by_value(sys.modules[__name__]):
        assert_equal(apportion.check(workload, strategy, workers=2, steps=3))


class Conv1D(nn.Module):
    """A Linear layer whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 4), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Scaled(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def transposed_layers() -> nn.Module:
    return nn.Sequential(Conv1D(6, 7), nn.Tanh(), Scaled(7, 5), Conv1D(5, 5))


def test_a_linear_layer_whose_weight_is_transposed_is_sliced_too() -> None:
    assert [is_transposed(m) for m in transposed_layers()] == [True, False, False, True]
    x = networks.numbers(13, 3, 6)
    workload = networks.workload(
        transposed_layers, lambda: TensorDataset(x, networks.numbers(13, 3, 5)), 6, loss=F.mse_loss
    )
    with by_value(networks), by_value(sys.modules[__name__]):
        assert_equal(apportion.check(workload, "tensor_parallel", workers=2, steps=3))

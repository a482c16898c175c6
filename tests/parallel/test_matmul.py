"""Products of a Linear layer in pieces and with the weight on the left: the same numbers as in the usual form."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from apportion.parallel.ops import matmul
from apportion.parallel.ops.factored_linear import Products, plain_layers

ROWS = (1, 2, 47, 48, 64, 96, 97, 128, 191, 192)
SHAPES = ((256, 256), (700, 300), (1025, 2048), (2048, 1024))


def given(rows: int, out: int, into: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + out)
    return tuple(torch.randn(*shape, dtype=torch.float64) for shape in ((rows, into), (out, into), (rows, out)))  # type: ignore[return-value]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_every_form_gives_the_same_product(rows: int, out: int, into: int) -> None:
    x, weight, dy = given(rows, out, into)
    bias = torch.randn(out, dtype=torch.float64)
    torch.testing.assert_close(matmul.outputs(x, weight, bias), functional.linear(x, weight, bias))
    torch.testing.assert_close(matmul.outputs(x, weight, None), functional.linear(x, weight))
    torch.testing.assert_close(matmul.input_gradient(dy, weight), dy @ weight)
    torch.testing.assert_close(matmul.weight_gradient(dy, x), dy.t() @ x)
    gradient = torch.ones_like(weight)
    matmul.add_weight_gradient(gradient, dy, x)
    torch.testing.assert_close(gradient, dy.t() @ x + 1)


def test_the_form_is_another_one_where_rows_are_few() -> None:
    x, weight, dy = given(64, 1024, 2048)
    x, weight, dy = x.float(), weight.float(), dy.float()
    assert matmul._suits(x, weight)
    assert not torch.equal(matmul.input_gradient(dy, weight), dy @ weight), "it is the usual form, to the bit"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 300), (2, 5, 300), (300,)])
def test_linear_has_the_gradients_of_torch_s(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(300, 256, bias=bias).double()
    x = torch.randn(*shape, dtype=torch.float64)
    found = []
    for function in (matmul.linear, functional.linear):
        leaf = x.clone().requires_grad_()
        y = function(leaf, layer.weight, layer.bias)
        y.mul_(2.0)  # what comes after may write to it in place
        found.append((y, *torch.autograd.grad(y.square().sum(), (leaf, *layer.parameters()))))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_a_gradient_of_the_gradient_is_torch_s() -> None:
    layer = nn.Linear(300, 256).double()
    x = torch.randn(7, 300, dtype=torch.float64)
    found = []
    for function in (matmul.linear, functional.linear):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf, layer.weight, layer.bias).pow(3).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), (leaf, *layer.parameters())))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_gradients_that_are_put_off_add_up_to_those_of_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4)).double()
    x = torch.randn(70, 300, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    later = Products(plain_layers(model))
    for part in x.split(16):
        model(part).square().sum().backward()
        later.add_up()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
